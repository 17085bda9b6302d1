"""Costs of a device for denoising and training one network, and for changing between them.

Changing over from one to the other on a device is what TAG costs; the adapter's way to another
device is what publication costs.

Denoising steps and log-probs are the project's own (`shared.diffusion`), overheads included.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import AdamW

from digenrl.trace.device_profile.ladder import (
    Ladder,
    Rung,
    Stopwatch,
    climb,
    fitting,
    forget_peak,
    median_seconds,
    peak_bytes,
    powers_of_two,
    timed,
)
from digenrl.trace.device_profile.network import Network
from digenrl.trace.launches import LaunchCounter
from services.scheduler.costs.host import Launches
from services.trainer.engine.storing import store_weights
from shared.devices.protocols import Snapshot
from shared.diffusion.sampling.sampler import Denoising, SamplingPlan
from shared.diffusion.sampling.transition import transition
from shared.diffusion.weights.shards import HostBuffers
from shared.diffusion.weights.trained_weights import (
    StagedTensors,
    Staging,
    WeightsInUse,
    trained_tensors,
    weights_digest,
)
from shared.messages.contracts import ObjectRef
from shared.models.sigmas import linear_sigmas
from shared.recipe.tables import Run
from shared.run.shards import open_tensors
from shared.store import ObjectStore, StoreSettings, open_store

MeasuredCall = Callable[[], None]
RUN = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSwitch:
    """The change from training, with a gradient that is not committed, to denoising and back."""

    to_generation_seconds: float
    """The first denoising step after training, beyond the second. Noise can make it negative."""
    to_training_seconds: float
    """The first training pass after denoising, beyond the second."""
    gradient_unchanged: bool
    """Whether the denoising steps left it as it was, to the last bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The adapter's way from the trainer into use on another device, in the order of its parts."""

    num_bytes: int
    digest: str
    copy_seconds: float
    """To host memory that is kept from one version to the next; the trainer's device is held."""
    digest_seconds: float
    store_seconds: float
    """Digest each object, write and flush it, to a folder."""
    stage_seconds: float
    """Read, verify and copy to the device, one object while the next is read; concurrently with
    generation."""
    pause_seconds: float
    """Between two fragments: the exchange of pointers."""

    @property
    def seconds(self) -> float:
        """Seconds from the optimizer step to weights that can be adopted."""
        return self.copy_seconds + self.digest_seconds + self.store_seconds + self.stage_seconds


def changing_over(
    network: Network, *, denoise: MeasuredCall, train: MeasuredCall, repeats: int
) -> RoleSwitch:
    """Trains, denoises twice, trains twice, and so on: the first of two pays for the change.

    Raises:
        torch.OutOfMemoryError: if the device cannot do one with the memory that the other
            leaves.
    """
    device = network.device
    denoise()
    train()
    kept = [gradient.clone() for gradient in _gradients(network)]
    steps: list[tuple[float, float]] = []
    passes: list[tuple[float, float]] = []
    unchanged = True
    for _ in range(repeats):
        steps.append((timed(device, denoise), timed(device, denoise)))
        unchanged = unchanged and _same_bits(kept, _gradients(network))
        passes.append((timed(device, train), timed(device, train)))
        for copy, gradient in zip(kept, _gradients(network), strict=True):
            copy.copy_(gradient)
    return RoleSwitch(
        to_generation_seconds=_first_beyond_second(steps),
        to_training_seconds=_first_beyond_second(passes),
        gradient_unchanged=unchanged,
    )


def publication(network: Network, repeats: int) -> Publication:
    """Returns medians of ``repeats``, after one that does not count: it makes the kept memory."""
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(StoreSettings(url=Path(folder).as_uri()))
        buffers = HostBuffers(Run.model_fields["shard_bytes"].default)
        rounds = [_published(network, store, buffers) for _ in range(repeats + 1)][1:]
    parts = [part.name for part in fields(Publication) if part.name.endswith("_seconds")]
    medians = {part: statistics.median(getattr(each, part) for each in rounds) for part in parts}
    return replace(rounds[-1], **medians)


def _published(network: Network, store: ObjectStore, buffers: HostBuffers) -> Publication:
    """Does what a trainer does that commits, and then what a rollout worker does that follows."""
    in_use, weights = WeightsInUse(network.transformer), trained_tensors(network.transformer)
    watch = Stopwatch(network.device)
    parts = buffers.copy(weights, {})
    copied = watch.lap()
    snapshot = Snapshot(digest=weights_digest(weights), weights=parts, checkpoint=())
    digested = watch.lap()
    ref = asyncio.run(store_weights(store, RUN, snapshot))
    stored = watch.lap()
    staged = asyncio.run(_staged(network, store, ref, snapshot.digest))
    prepared = watch.lap()
    in_use.adopt(staged)
    paused = watch.lap()
    asyncio.run(store.delete_folder(RUN))
    return Publication(
        num_bytes=sum(part.stored.nbytes for part in parts),
        digest=snapshot.digest,
        copy_seconds=copied,
        digest_seconds=digested,
        store_seconds=stored,
        stage_seconds=prepared,
        pause_seconds=paused,
    )


async def _staged(
    network: Network, store: ObjectStore, ref: ObjectRef, digest: str
) -> StagedTensors:
    staging = Staging(network.transformer)
    async for part in (await open_tensors(store, ref, digest)).parts():
        await asyncio.to_thread(staging.add, part)
    return await asyncio.to_thread(staging.finish, digest)


def _gradients(network: Network) -> list[Tensor]:
    return [weight.grad for weight in network.adapter if weight.grad is not None]


def _same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    """Compares float32 tensors by their bits: a value that is no number equals nothing."""
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


def _first_beyond_second(pairs: list[tuple[float, float]]) -> float:
    firsts, seconds = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return statistics.median(firsts) - statistics.median(seconds)


NOISE_LEVEL = 0.7
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0

ShowMeasurement = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMeasurement:
    generation: Ladder
    training: Ladder
    optimizer_seconds: float | None
    """None if not even one row can be trained."""
    switch: RoleSwitch | None
    """None if training and generation do not fit the device together."""
    publication: Publication
    launches: Launches | None = None
    """Kernels of a call and of a training pass."""


def measure(
    network: Network, *, max_batch: int, repeats: int, report: ShowMeasurement
) -> DeviceMeasurement:
    """Measures one network. Sizes that do not fit the device are left out, and reported."""
    sizes = powers_of_two(max_batch)

    def generating(samples: int) -> Rung:
        rung = _rung(network, samples, denoising(network, samples, repeats + 1), repeats)
        return _reported(rung, "denoising step", "sample", report)

    def learning(rows: int) -> Rung:
        rung = _rung(network, rows, training(network, rows), repeats)
        return _reported(rung, "training pass", "row", report)

    generation = climb(sizes, generating)
    _report_end(generation, "samples", report)
    optimizer = AdamW(network.adapter, lr=LEARNING_RATE)  # its state stays, as it does in a trainer
    optimizer_seconds = fitting(lambda: _optimizer_step(network, optimizer, repeats))
    learned = climb(sizes, learning)
    _report_end(learned, "rows", report)
    report("changing over between the two, then publishing and adopting the adapter")
    return DeviceMeasurement(
        generation=generation,
        training=learned,
        optimizer_seconds=optimizer_seconds,
        switch=_switch(network, generation, learned, repeats),
        publication=publication(network, repeats),
        launches=counted(network) if learned.rungs else None,
    )


def counted(network: Network) -> Launches:
    """Counts the kernels of a call and of a training pass."""
    return Launches(
        step=_launches(denoising(network, 1, 1)), training_pass=_launches(training(network, 1))
    )


def _launches(work: MeasuredCall) -> int:
    counter = LaunchCounter()
    with counter:
        work()
    return counter.launches


def denoising(network: Network, samples: int, steps: int) -> MeasuredCall:
    """Take the next denoising step of this many samples; at most ``steps`` times."""
    plan = SamplingPlan(
        sigmas=linear_sigmas(steps + 1), window=range(steps), noise_level=NOISE_LEVEL
    )
    path = Denoising(plan, seeds=range(samples), shape=network.latent_shape, device=network.device)
    velocity = network.velocity(samples)
    return lambda: path.advance(velocity)


def training(network: Network, rows: int) -> MeasuredCall:
    """Add the gradient of this many (sample, step) rows, in one forward and backward pass."""
    plan = SamplingPlan(sigmas=linear_sigmas(4), window=range(3), noise_level=NOISE_LEVEL)
    step = plan.step(torch.arange(rows) % 3)
    sigma = step.sigma.to(network.device)
    shape = (rows, *network.latent_shape)
    latents, arrived = (torch.randn(shape, device=network.device) for _ in range(2))
    velocity = network.velocity(rows)

    def accumulate() -> None:
        with torch.enable_grad():
            step_result = transition(velocity(latents, sigma), latents, step, arrived=arrived)
            torch.autograd.backward(-step_result.log_prob.mean())

    return accumulate


def _rung(network: Network, rows: int, work: MeasuredCall, repeats: int) -> Rung:
    forget_peak(network.device)
    seconds = median_seconds(network.device, work, repeats)
    return Rung(rows, seconds, peak_bytes(network.transformer, network.device))


def _optimizer_step(network: Network, optimizer: AdamW, repeats: int) -> float:
    training(network, 1)()

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(network.adapter, MAX_GRAD_NORM)
        optimizer.step()

    return median_seconds(network.device, step, repeats)


def _switch(
    network: Network, generation: Ladder, learned: Ladder, repeats: int
) -> RoleSwitch | None:
    if not generation.rungs or not learned.rungs:
        return None
    denoise = denoising(network, generation.frugal.rows, 2 * repeats + 1)
    train = training(network, learned.frugal.rows)
    return fitting(lambda: changing_over(network, denoise=denoise, train=train, repeats=repeats))


def _reported(rung: Rung, what: str, unit: str, report: ShowMeasurement) -> Rung:
    report(
        f"{what}, {unit}s {rung.rows}: {rung.seconds * 1e3:.1f} ms, "
        f"{rung.per_row * 1e3:.1f} ms per {unit}, {rung.peak_bytes / 2**30:.1f} GiB"
    )
    return rung


def _report_end(ladder: Ladder, unit: str, report: ShowMeasurement) -> None:
    if ladder.out_of_memory is not None:
        report(f"{ladder.out_of_memory} {unit} do not fit the device")
