"""A fluid device whose sum is a tensor of counted rows, so that the real exchange adds it up.

For each trained step of each sample the sum has how often it is in it, and a number that follows
from what was read of it and from the weights at which it was trained. A step refuses a total in
which a row of its update is not exactly once, and the digest of the next weights follows from the
total.
"""

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from bench.cluster.blobs import (
    DIGEST_BYTES,
    EmulatedWeights,
    adapter_blob,
    digest_of,
    filled,
    joined,
)
from bench.cluster.build import Emulation, Named
from bench.cluster.generation import EmulatedDevice, check_group
from bench.cluster.hold import QueuedHeld
from bench.cluster.ledger import SKIPPED, Entry, entries_of
from bench.cluster.members import CHECKSUM_DIGITS, EmulatedMember, first_weights
from services.scheduler.costs import fluid
from services.scheduler.costs.shape import Shape
from services.trainer.fluid.exchange import WHOLE_BATCH, Sum
from services.trainer.fluid.protocols import TotalMeasure
from services.trainer.fluid.sums import SumLayout, Term
from shared.devices.protocols import GroupData, SamplingWeights, Snapshot
from shared.diffusion.training.tally import Tally
from shared.errors import OutOfMemory
from shared.messages.fluid import Piece
from shared.recipe.recipe import Recipe
from shared.run.manifest import StoredTensors
from tests.world.loop import Flaw, current

VALUE_BYTES = 5
"""Of a row's digest: sums of a few such numbers are exact in float64."""
NOTHING = {"onpolicy_ratio_error": 0.0, "loss": 0.0, "skipped_not_finite": 0.0, "grad_norm": 1.0}


def layout_of(shape: Shape) -> SumLayout:
    size = 2 * shape.groups * shape.group_size * shape.trained_steps
    return SumLayout(size, torch.float64, torch.device("cpu"))


def next_digest(before: str, batch: int, gradient: torch.Tensor) -> str:
    """Return the digest of the weights that a total leads to."""
    told = hashlib.sha256(f"{before}/{batch}/".encode())
    told.update(gradient.numpy().tobytes())
    return told.hexdigest()


def add_rows(
    gradient: torch.Tensor, shape: Shape, steps: range, entries: Iterable[Entry], weights: str
) -> None:
    """Count some steps of some samples, trained at the weights with that digest."""
    rows = gradient.view(shape.groups, shape.group_size, shape.trained_steps, 2)
    for entry in entries:
        read = hashlib.sha256(entry.digest + weights.encode()).digest()
        value = 0 if entry.digest == SKIPPED else int.from_bytes(read[:VALUE_BYTES])
        row = rows[entry.origin.group, entry.origin.sample, steps.start : steps.stop]
        row += torch.tensor([1.0, float(value)], dtype=torch.float64)


def _takes(fault: Flaw) -> bool:
    """Whether a fault of the world strikes here; outside of one, nothing does."""
    process = current()
    return process is not None and process.takes(fault)


def counting_member(
    emulation: Emulation, named: Named, recipe: Recipe, ready: Callable[[], Awaitable[object]],
    *, is_group: bool = False, flawed: set[tuple[str, int]] | None = None,
) -> "CountingMember":  # fmt: skip
    """Make a member; ``ready`` returns once the run may begin."""
    held, first = emulation.held(named), first_weights(emulation.setting.seed)
    assert isinstance(held, QueuedHeld)
    return CountingMember(
        EmulatedDevice(emulation.profile, named.kind, held, emulation.sizes, first),
        held, ready, emulation.setting.shard_bytes,
        steps_concurrently=recipe.schedule.staleness_limit > 0 and not is_group,
        trained=first, lags=recipe.algorithm.nft_decay > 0,
        layout=layout_of(emulation.profile.shape),
        by_group=recipe.trainer.deterministic, updates=recipe.trainer.updates,
        flawed=set() if flawed is None else flawed,
    )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class CountingMember(EmulatedMember):
    trained: str
    """Digest of the newest trained weights; those that sample are the same, or follow them."""
    lags: bool
    """Whether an old policy samples."""
    layout: SumLayout
    by_group: bool
    updates: int
    flawed: set[tuple[str, int]]
    """Names of devices and the versions that they have made with other bits."""
    _sums: dict[int, torch.Tensor] = field(default_factory=dict)
    _taken: int = 0
    """Updates of the batch that were taken."""

    @property
    def _shape(self) -> Shape:
        return self.generating.profile.shape

    def begin(self) -> None:
        self._sums = {}

    async def restore(self, weights: StoredTensors, checkpoint: StoredTensors) -> None:
        await EmulatedMember.restore(self, weights, checkpoint)
        self.trained, self._taken = self.generating.weights, 0
        if self.lags:
            self.generating.weights = digest_of((await joined(checkpoint))[DIGEST_BYTES:])

    async def checksum(self) -> str:
        both = f"{self.trained}{self.weights_digest()}".encode()
        found = hashlib.sha256(both).hexdigest() if self.lags else self.trained
        return found[:CHECKSUM_DIGITS]

    async def weights(self) -> Snapshot:
        digest, sampling = self.trained, self.weights_digest()
        snapshot = await EmulatedMember.weights(self)
        if sampling == digest:
            return snapshot
        checkpoint = filled(f"{digest}{sampling}".encode(), self.generating.sizes.checkpoint)
        trained = adapter_blob(digest, self.generating.sizes.adapter)
        return Snapshot(
            digest, self._parts(trained), self._parts(checkpoint),
            sampling=SamplingWeights(sampling, snapshot.weights),
        )  # fmt: skip

    async def train(self, group: GroupData, piece: Piece) -> None:
        profile = self.generating.profile
        check_group(profile, group)
        rows = piece.num_samples * piece.num_steps
        seconds = fluid.piece_seconds(profile, self.generating.kind, rows)
        entries = entries_of(group, piece.samples, self.generating.sizes.start)
        weights = self.trained
        await self.held.hold(self.held.drawn(seconds), "train")
        assert weights == self.trained, "weights changed while a piece was trained"
        if _takes("no memory"):
            if not self.by_group:
                half = entries[: len(entries) // 2]
                add_rows(self._sum_for(piece.group), self._shape, piece.steps, half, weights)
            raise OutOfMemory("in the middle of a piece", smaller=False)
        add_rows(self._sum_for(piece.group), self._shape, piece.steps, entries, weights)

    async def skip(self, piece: Piece) -> None:
        rows = self._sum_for(piece.group).view(
            self._shape.groups, self._shape.group_size, self._shape.trained_steps, 2
        )
        rows[piece.group, piece.samples.start : piece.samples.stop,
             piece.steps.start : piece.steps.stop, 0] += 1  # fmt: skip

    def _sum_for(self, group: int) -> torch.Tensor:
        key = group if self.by_group else WHOLE_BATCH
        if key not in self._sums:
            self._sums[key] = self.layout.zeros()
        return self._sums[key]

    async def own_sum(self) -> Sum:
        return {key: Term(each.clone(), Tally().as_dict()) for key, each in self._sums.items()}

    async def measure(self, total: Term) -> TotalMeasure:  # type: ignore[override]
        assert total.gradient is not None
        digest = hashlib.sha256(total.gradient.numpy().tobytes()).hexdigest()
        return TotalMeasure(digest, 1.0, 1.0)

    async def step(  # type: ignore[override]
        self, batch: int, total: Term, measure: TotalMeasure
    ) -> Mapping[str, float]:
        """Raises AssertionError if a row of the update is not in the total exactly once."""
        assert total.gradient is not None
        self._check(batch, total.gradient)
        await self._take(fluid.step_seconds(self.generating.profile), "commit")
        self.trained = next_digest(self.trained, batch, total.gradient)
        if (process := current()) is not None and process.takes("other bits"):
            self.trained = hashlib.sha256(self.trained.encode()).hexdigest()
            self.flawed.add((process.name, batch + 1))
        self._taken = (self._taken + 1) % self.updates
        self._sample_by(self._following())
        self.begin()
        return NOTHING

    def _following(self) -> str:
        """Return the digest of what samples after an update: an old policy follows the last one."""
        if not self.lags:
            return self.trained
        old = EmulatedWeights(self.generating.weights)
        return old.digest if self._taken else old.following(self.trained).digest

    def _sample_by(self, weights: str) -> None:
        if self.steps_concurrently:
            self.ahead = weights
        else:
            self.generating.weights = weights

    def _check(self, batch: int, gradient: torch.Tensor) -> None:
        shape, part = self._shape, self._shape.groups // self.updates
        counts = gradient.view(shape.groups, -1, 2)[..., 0]
        wanted = torch.zeros_like(counts)
        wanted[self._taken * part : (self._taken + 1) * part] = 1
        wrong = (counts != wanted).any(dim=1).nonzero().flatten().tolist()
        assert not wrong, (
            f"batch {batch}, update {self._taken}: rows of the groups {wrong} are not trained once"
        )
