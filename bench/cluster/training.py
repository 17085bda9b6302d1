"""The emulated trainer: devices that train samples, and what they have added up together."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from bench.cluster.blobs import (
    DIGEST_BYTES,
    EmulatedWeights,
    adapter_blob,
    digest_of,
    filled,
    joined,
    parts_of,
)
from bench.cluster.generation import EmulatedDevice, check_group
from bench.cluster.hold import Held
from bench.cluster.ledger import Ledger, entries_of
from bench.cluster.payloads import Scaled
from services.scheduler.costs.profile import (
    Profile,
    merged_row_seconds,
    row_seconds,
    speed,
)
from services.scheduler.costs.shape import Shape
from shared.devices.protocols import GroupData, SamplingWeights, Snapshot
from shared.devices.slices import GroupSlice
from shared.errors import ContractError
from shared.run.manifest import StoredTensors

"""The optimizer's state is not moved: a trainer that only restarts never reads it."""


@dataclass(slots=True)
class TrainingLane:
    """Takes samples one after the other: a device."""

    profile: Profile
    held: Held
    seconds_per_row: float
    """Seconds on an unscaled clock that a row takes."""
    seconds_per_merged_row: float
    """The same of a row that stands for all samples of a group."""
    start: int
    """Bytes that the samples of a fragment have in common."""
    ledger: Ledger
    """The account of the batch, which all lanes share."""

    async def accumulate(self, group: GroupData, group_slice: GroupSlice) -> None:
        check_group(self.profile, group)
        samples = group_slice.samples
        merged, apart = rows_of(group_slice, self.profile.shape)
        takes = merged * self.seconds_per_merged_row + apart * self.seconds_per_row
        seconds = self.held.drawn(takes)
        # Beside the hold, so that it takes none of the device's time.
        reading = asyncio.create_task(asyncio.to_thread(entries_of, group, samples, self.start))
        await self.held.hold(seconds, "train")
        self.ledger.take(await reading, group_slice)


def rows_of(group_slice: GroupSlice, shape: Shape) -> tuple[int, int]:
    """Returns the rows of a slice that stand for all its samples, in steps that a group computes
    once, and the others."""
    steps = group_slice.steps(shape.trained_steps)
    merged = sum(step < shape.merged_steps for step in steps)
    return merged, len(group_slice.samples) * (len(steps) - merged)


@dataclass(slots=True)
class EmulatedTraining:
    """A trainer whose weights are an account of what was trained, from the first batch on. Those
    that generate are the same, or follow from all that have been trained before."""

    profile: Profile
    devices: Sequence[TrainingLane]
    generating: Sequence[EmulatedDevice]
    """The same devices, where they may be lent: all of them have the weights."""
    sizes: Scaled
    weights_in_use: EmulatedWeights
    """Those that are trained."""
    sampling: EmulatedWeights
    """Those that generate."""
    ledger: Ledger
    shard_bytes: int
    """Most bytes of a stored object of weights; a checkpoint is in as many."""
    updates: int = 1
    """Optimizer steps per batch."""
    lags: bool = False
    """Whether another policy generates than the one that is trained."""
    _steps: int = 0
    """Optimizer steps of the batch so far."""

    def weights_digest(self) -> str:
        return self.weights_in_use.digest

    def sampling_digest(self) -> str:
        return self.sampling.digest

    async def restore(self, weights: StoredTensors, checkpoint: StoredTensors) -> None:
        digest, states = digest_of(await joined(weights)), await joined(checkpoint)
        if digest_of(states) != digest:
            raise ContractError("the checkpoint is not that of these weights")
        self.weights_in_use = EmulatedWeights(digest)
        self._generate_by(EmulatedWeights(digest_of(states[DIGEST_BYTES:])))

    def begin(self) -> None:
        self.ledger.clear()
        self._steps = 0

    def skip(self, num_samples: int) -> None:
        self.ledger.num_skipped += num_samples

    async def step(self, batch: int, scale: float = 1.0) -> dict[str, float]:
        """Raises RuntimeError if not every sample of the step was trained exactly once."""
        samples, before = self.profile.shape.samples // self.updates, self.weights_in_use.digest
        updates = self.profile.shape.updates / self.updates
        seconds = updates * self.profile.variant.optimizer_seconds
        steps = (lane.held.hold(seconds, "commit") for lane in self.devices)
        closing = asyncio.to_thread(self.ledger.close, batch, samples, before)
        after, _ = await asyncio.gather(closing, asyncio.gather(*steps))
        self.weights_in_use = EmulatedWeights(after)
        self.ledger.clear()
        self._steps += 1
        if self._steps == self.updates:
            follows = self.sampling.following(after) if self.lags else self.weights_in_use
            self._generate_by(follows)
        nothing = dict.fromkeys(("onpolicy_ratio_error", "loss", "skipped_not_finite"), 0.0)
        return {**nothing, "grad_norm": 1.0}

    async def replace(self, weights: StoredTensors, sampling: StoredTensors | None) -> None:
        self.weights_in_use = EmulatedWeights(digest_of(await joined(weights)))
        generates = None if sampling is None else digest_of(await joined(sampling))
        self._generate_by(EmulatedWeights(generates or self.weights_in_use.digest))

    async def copy(self, *, states: bool) -> Callable[[], Awaitable[Snapshot]]:
        digests = self.weights_in_use.digest, self.sampling.digest

        async def taken() -> Snapshot:
            return await asyncio.to_thread(self._snapshot, *digests, states=states)

        return taken

    def _snapshot(self, digest: str, sampling: str, *, states: bool) -> Snapshot:
        adapter = adapter_blob(digest, self.sizes.adapter)
        number = math.ceil(len(adapter) / self.shard_bytes)
        checkpoint = filled(f"{digest}{sampling}".encode(), self.sizes.checkpoint)
        other = None
        if sampling != digest:
            other = SamplingWeights(
                sampling, parts_of(adapter_blob(sampling, self.sizes.adapter), number)
            )
        stored = parts_of(checkpoint, number) if states else []
        return Snapshot(digest, parts_of(adapter, number), stored, sampling=other)

    def _generate_by(self, weights: EmulatedWeights) -> None:
        self.sampling = weights
        for device in self.generating:
            device.weights = weights.digest


def lanes(
    profile: Profile, pool: Sequence[tuple[str, Held]], ledger: Ledger, *, start: int
) -> list[TrainingLane]:
    """Makes one lane for each (kind, device) of the pool."""
    return [
        TrainingLane(
            profile,
            held,
            row_seconds(profile) / speed(profile, kind, "trainer"),
            merged_row_seconds(profile) / speed(profile, kind, "trainer"),
            start,
            ledger,
        )
        for kind, held in pool
    ]
