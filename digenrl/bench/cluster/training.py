"""The emulated trainer: devices that train samples, and what they have added up together."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from digenrl.bench.cluster.blobs import (
    EmulatedWeights,
    adapter_blob,
    digest_of,
    filled,
)
from digenrl.bench.cluster.generation import EmulatedDevice, check_group
from digenrl.bench.cluster.hold import Held
from digenrl.bench.cluster.payloads import Scaled
from services.scheduler.costs.profile import Profile, train_group_seconds
from shared.engines import GradientPart, GroupData, Weights
from shared.errors import ContractError
from shared.pieces import Cut

CHECKPOINT_BYTES = 1024
"""The optimizer's state is not moved: a trainer that only restarts never reads it."""


@dataclass(slots=True)
class TrainingLane:
    """What takes samples one after the other: a device, or without TSP the whole pool."""

    profile: Profile
    held: Held
    seconds_per_sample: float
    """On an unscaled clock."""
    num_trained: Fraction = Fraction(0)
    """Samples, since the batch began."""

    async def accumulate(self, group: GroupData, cut: Cut) -> None:
        check_group(self.profile, group)
        trained_steps = self.profile.shape.trained_steps
        samples = Fraction(len(cut.samples) * len(cut.steps(trained_steps)), trained_steps)
        seconds = self.held.drawn(float(samples) * self.seconds_per_sample)
        await self.held.hold(seconds, "train")
        self.num_trained += samples


@dataclass(slots=True)
class EmulatedTraining:
    """Of which only the counts of samples are real: a step checks that none is missing."""

    profile: Profile
    devices: Sequence[TrainingLane]
    generating: Sequence[EmulatedDevice]
    """The same devices, where they may be lent: all of them have the weights."""
    sizes: Scaled
    weights_in_use: EmulatedWeights
    num_elsewhere: int = 0
    """Samples that were skipped, or whose gradient was added."""

    def weights_digest(self) -> str:
        return self.weights_in_use.digest

    async def restore(self, adapter: bytes, checkpoint: bytes) -> None:
        self._use(EmulatedWeights(digest_of(adapter)))

    def begin(self) -> None:
        self.num_elsewhere = 0
        for lane in self.devices:
            lane.num_trained = Fraction(0)

    def skip(self, num_samples: int) -> None:
        self.num_elsewhere += num_samples

    async def add(self, part: GradientPart) -> None:
        if len(part.gradient) != self.sizes.gradient:
            raise ContractError(f"a gradient of {len(part.gradient)} bytes is not one of these")
        self.num_elsewhere += round(part.tally["samples"])

    async def step(self, batch: int, scale: float = 1.0) -> dict[str, float]:
        trained = self.num_elsewhere + sum(lane.num_trained for lane in self.devices)
        if trained != self.profile.shape.samples:
            raise RuntimeError(f"batch {batch} has {trained} samples in its gradient")
        seconds = self.profile.shape.updates * self.profile.variant.optimizer_seconds
        steps = (lane.held.hold(seconds, "commit") for lane in self.devices)
        await asyncio.gather(*steps)
        self._use(self.weights_in_use.after(batch))
        return {"onpolicy_ratio_error": 0.0, "grad_norm": 1.0}

    async def weights(self) -> Weights:
        digest = self.weights_in_use.digest
        return Weights(
            digest=digest,
            adapter=adapter_blob(digest, self.sizes.adapter),
            checkpoint=filled(digest.encode(), CHECKPOINT_BYTES),
        )

    def _use(self, weights: EmulatedWeights) -> None:
        self.weights_in_use = weights
        for device in self.generating:
            device.weights = weights.digest


def lanes(
    profile: Profile, pool: Sequence[tuple[str, Held]], devices: Mapping[str, int], *, tsp: bool
) -> list[TrainingLane]:
    """One for each (kind, device) of the pool. Without TSP the pool is one lane, which takes a
    group in the time of its slowest share."""
    size = profile.shape.group_size
    if tsp:
        return [
            TrainingLane(profile, held, train_group_seconds(profile, {kind: 1}) / size)
            for kind, held in pool
        ]
    whole = train_group_seconds(profile, devices, tsp=False)
    return [TrainingLane(profile, pool[0][1], whole / size)]
