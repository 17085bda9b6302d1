"""What a device takes for denoising and for training one network, by the size of the call.

Denoising steps and log-probs are the project's own (`shared.diffusion`), overheads included.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim import AdamW

from digenrl.profile.handover import Publication, Switch, Work, changing_over, publication
from digenrl.profile.ladder import PATIENCE, Ladder, Rung, climb, fitting, powers_of_two
from digenrl.profile.network import Network
from digenrl.profile.timing import forget_peak, median_seconds, peak_bytes
from shared.diffusion.sampler import Denoising, SamplingPlan
from shared.diffusion.transition import transition
from shared.models.sigmas import linear_sigmas

NOISE_LEVEL = 0.7
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMeasurement:
    generation: Ladder
    training: Ladder
    optimizer_seconds: float | None
    """None if not even one row can be trained."""
    switch: Switch | None
    """None if training and generation do not fit the device together."""
    publication: Publication


def measure(network: Network, *, max_batch: int, repeats: int, report: Report) -> DeviceMeasurement:
    """Measures one network. What does not fit the device is left out, and reported."""
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
    learned = climb(sizes, learning, patience=PATIENCE)
    _report_end(learned, "rows", report)
    report("changing over between the two, then publishing and adopting the adapter")
    return DeviceMeasurement(
        generation=generation,
        training=learned,
        optimizer_seconds=optimizer_seconds,
        switch=_switch(network, generation, learned, repeats),
        publication=publication(network, repeats),
    )


def denoising(network: Network, samples: int, steps: int) -> Work:
    """Takes the next denoising step of so many samples; at most ``steps`` times."""
    plan = SamplingPlan(
        sigmas=linear_sigmas(steps + 1), window=range(steps), noise_level=NOISE_LEVEL
    )
    path = Denoising(plan, seeds=range(samples), shape=network.latent_shape, device=network.device)
    velocity = network.velocity(samples)
    return lambda: path.advance(velocity)


def training(network: Network, rows: int) -> Work:
    """Adds the gradient of so many (sample, step) rows, in one forward and backward pass."""
    plan = SamplingPlan(sigmas=linear_sigmas(4), window=range(3), noise_level=NOISE_LEVEL)
    step = plan.step(torch.arange(rows) % 3)
    sigma = step.sigma.to(network.device)
    shape = (rows, *network.latent_shape)
    latents, arrived = (torch.randn(shape, device=network.device) for _ in range(2))
    velocity = network.velocity(rows)

    def accumulate() -> None:
        with torch.enable_grad():
            taken = transition(velocity(latents, sigma), latents, step, arrived=arrived)
            torch.autograd.backward(-taken.log_prob.mean())

    return accumulate


def _rung(network: Network, rows: int, work: Work, repeats: int) -> Rung:
    forget_peak(network.device)
    seconds = median_seconds(network.device, work, repeats)
    return Rung(rows, seconds, peak_bytes(network.transformer, network.device))


def _optimizer_step(network: Network, optimizer: AdamW, repeats: int) -> float:
    training(network, 1)()

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(network.adapter, MAX_GRAD_NORM)
        optimizer.step()

    return median_seconds(network.device, step, repeats)


def _switch(network: Network, generation: Ladder, learned: Ladder, repeats: int) -> Switch | None:
    if not generation.rungs or not learned.rungs:
        return None
    denoise = denoising(network, generation.frugal.rows, 2 * repeats + 1)
    train = training(network, learned.frugal.rows)
    return fitting(lambda: changing_over(network, denoise=denoise, train=train, repeats=repeats))


def _reported(rung: Rung, what: str, unit: str, report: Report) -> Rung:
    report(
        f"{what}, {unit}s {rung.rows}: {rung.seconds * 1e3:.1f} ms, "
        f"{rung.per_row * 1e3:.1f} ms per {unit}, {rung.peak_bytes / 2**30:.1f} GiB"
    )
    return rung


def _report_end(ladder: Ladder, unit: str, report: Report) -> None:
    if ladder.out_of_memory is not None:
        report(f"{ladder.out_of_memory} {unit} do not fit the device")
