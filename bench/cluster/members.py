"""Emulated members: each generates, trains pieces and steps with one set of weights.

What a member has summed is an account of the pieces in it (`bench.cluster.ledger`), and so is the
total, from which the digest of the next weights follows: a step refuses a total in which not every
trained step of every sample is exactly once.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

from bench.cluster.accounts import Account, PieceEntries, Total
from bench.cluster.blobs import BytesPart, EmulatedWeights, Kept, digest_of, head_of, parts_of
from bench.cluster.generation import EmulatedDevice, check_group
from bench.cluster.hold import QueuedHeld
from bench.cluster.ledger import entries_of
from bench.runner.figures import Use
from services.scheduler.core.fluid.fluid_state import num_rows
from services.scheduler.costs import fluid
from services.scheduler.costs.capacity import pass_rows
from services.trainer.fluid.exchange import WHOLE_BATCH, Sum
from services.trainer.fluid.protocols import TotalMeasure
from shared.devices.protocols import GroupData, Snapshot
from shared.errors import ContractError
from shared.messages.fluid import Piece
from shared.run.manifest import StoredTensors
from shared.store.backend import Content

ONE_AT_A_TIME = Lock()
NEWEST: dict[str, tuple[Content, Content]] = {}
"""Weights and states of the newest version that a member of this host has made."""
KEPT = Kept()
CHECKSUM_DIGITS = 32
"""Hexadecimal digits of a checksum: it begins the digest of the weights, which all else follows."""


@dataclass(slots=True)
class EmulatedMember:
    """Implements `FluidDevice` over a device that is held for the profile's seconds."""

    generating: EmulatedDevice
    """The same device as it generates; its weights are those that are trained."""
    held: QueuedHeld
    ready: Callable[[], Awaitable[object]]
    """Returns once the run may begin."""
    shard_bytes: int
    """Most bytes of a stored object."""
    account: Account = field(default_factory=Account)
    steps_concurrently: bool = False
    """Whether it steps and copies while it generates: time goes by, and what the device does next
    takes as much longer, since it is the same memory that both read and write."""
    ahead: str | None = None
    """Digest of what its step has made beside."""
    older: str = ""
    """Digest of the weights before."""

    @property
    def pass_rows(self) -> int:
        return pass_rows(self.generating.profile, self.generating.kind, "member")

    def weights_digest(self) -> str:
        return self.ahead or self.generating.weights

    async def checksum(self) -> str:
        await self.ready()
        return self.weights_digest()[:CHECKSUM_DIGITS]

    def take(self) -> None:
        assert self.ahead is not None
        self.older, self.generating.weights = self.generating.weights, self.ahead
        self.ahead = None

    @contextmanager
    def before(self) -> Iterator[None]:
        newest, self.generating.weights = self.generating.weights, self.older
        try:
            yield
        finally:
            self.generating.weights = newest

    async def restore(self, weights: StoredTensors, checkpoint: StoredTensors) -> None:
        digest = digest_of(await head_of(weights))
        if digest_of(await head_of(checkpoint)) != digest:
            raise ContractError("the checkpoint is not that of these weights")
        self.ahead = None
        if digest != self.generating.weights:  # the first version is what all begin with
            await self.held.hold(fluid.load_seconds(self.generating.profile), "adopt")
        self.generating.weights = digest
        self.begin()

    def begin(self) -> None:
        self.account = Account()

    async def train(self, group: GroupData, piece: Piece) -> None:
        profile = self.generating.profile
        check_group(profile, group)
        rows = num_rows(piece, profile.shape.merged_steps)
        seconds = fluid.piece_seconds(profile, self.generating.kind, rows)
        # Beside the hold, so that it takes none of the device's time.
        reading = asyncio.create_task(
            asyncio.to_thread(entries_of, group, piece.samples, self.generating.sizes.start)
        )
        await self.held.hold(self.held.drawn(seconds), "train")
        self.account.pieces.append(PieceEntries(piece.steps, tuple(await reading)))

    async def skip(self, piece: Piece) -> None:
        self.account.skipped_rows += piece.num_samples * piece.num_steps

    async def own_sum(self) -> Sum:
        return {WHOLE_BATCH: self.account}

    async def measure(self, total: Total) -> TotalMeasure:
        return TotalMeasure(total.sum_id, 1.0, 1.0)

    async def step(self, batch: int, total: Total, measure: TotalMeasure) -> Mapping[str, float]:
        """Raises RuntimeError if the total is not all of the batch, trained from these weights."""
        newest = self.generating.weights
        if not self.steps_concurrently and total.before != newest:
            raise RuntimeError(f"{self.held.name}: the total of batch {batch} is of other weights")
        await self._take(fluid.step_seconds(self.generating.profile), "commit")
        if self.steps_concurrently:
            self.ahead = total.after
        else:
            self.generating.weights = total.after
        self.begin()
        nothing = dict.fromkeys(("onpolicy_ratio_error", "loss", "skipped_not_finite"), 0.0)
        return {**nothing, "grad_norm": 1.0}

    async def weights(self) -> Snapshot:
        """Copy to the host what is to be committed."""
        digest, profile = self.weights_digest(), self.generating.profile
        await self._take(fluid.snapshot_seconds(profile, self.generating.kind), "snapshot")
        return await asyncio.to_thread(partial(self._packed, digest))

    async def _take(self, seconds: float, use: Use) -> None:
        """Let so many seconds go by, at full scale."""
        if self.steps_concurrently:
            self.held.overhead_s += seconds
            await asyncio.sleep(seconds / self.held.scale)
        else:
            await self.held.hold(seconds, use)

    def _packed(self, digest: str) -> Snapshot:
        sizes = self.generating.sizes
        with ONE_AT_A_TIME:
            if digest not in NEWEST:
                NEWEST.clear()
                NEWEST[digest] = _version(digest, sizes.adapter, sizes.checkpoint)
            adapter, states = NEWEST[digest]
        return Snapshot(digest, self._parts(adapter), self._parts(states))

    def _parts(self, data: Content) -> list[BytesPart]:
        return parts_of(data, math.ceil(len(data) / self.shard_bytes))


def _version(digest: str, adapter: int, states: int) -> tuple[Content, Content]:
    """Return the weights and states of a version."""
    head = digest.encode()
    return KEPT.filled("adapter", head, adapter), KEPT.filled("states", head * 2, states)


def first_weights(seed: int) -> str:
    """Return the digest of the weights that every member begins with."""
    return EmulatedWeights.first(seed).digest
