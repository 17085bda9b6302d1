"""One batch's gradient as a transaction: begin, accumulate groups in any order, then step or abort.

TSP: samples and denoising steps are flattened into rows, so that one forward and backward pass
trains several steps of several samples. Fragment boundaries are gone before rows are cut.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from services.trainer.loss import clipped_surrogate, reference_kl
from shared.diffusion.lora import adapter_parameters
from shared.diffusion.models import Conditions, ModelAdapter, repeat_rows
from shared.diffusion.sampler import SamplingPlan, Trajectory
from shared.diffusion.transition import transition
from shared.recipe import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingGroup:
    """A whole group, ready to train. G samples, K trained steps."""

    trajectory: Trajectory
    advantages: Tensor
    """(G,)"""
    conditions: Conditions
    plan: SamplingPlan


@dataclass(slots=True)
class Tally:
    """What happened to the rows of a batch."""

    num_rows: int = 0
    loss: float = 0.0
    kl: float = 0.0
    ratio_sum: float = 0.0
    ratio_min: float = float("inf")
    ratio_max: float = float("-inf")
    num_clipped_low: int = 0
    num_clipped_high: int = 0
    num_zero_advantage: int = 0

    def metrics(self) -> dict[str, float]:
        rows = max(1, self.num_rows)
        return {
            "loss": self.loss,
            "kl": self.kl / rows,
            "ratio_mean": self.ratio_sum / rows,
            "ratio_min": self.ratio_min,
            "ratio_max": self.ratio_max,
            "onpolicy_ratio_error": max(abs(self.ratio_min - 1), abs(self.ratio_max - 1)),
            "clip_fraction_low": self.num_clipped_low / rows,
            "clip_fraction_high": self.num_clipped_high / rows,
            "zero_advantage_fraction": self.num_zero_advantage / rows,
        }


@dataclass(slots=True)
class GradientTransaction:
    """The gradient of one batch, summed in the adapter's ``grad`` fields."""

    model: ModelAdapter
    algorithm: Algorithm
    num_rows: int
    """Of the whole batch: the one denominator of every row's loss."""
    micro_batch: int
    """Samples per pass, each with all its trained steps."""
    guidance: float
    tally: Tally = field(default_factory=Tally)

    def begin(self) -> None:
        for parameter in adapter_parameters(self.model.transformer).values():
            parameter.grad = None
        self.tally = Tally()

    def accumulate(self, group: TrainingGroup) -> None:
        """Add the gradient of one group."""
        for first in range(0, len(group.advantages), self.micro_batch):
            self._accumulate_rows(group, slice(first, first + self.micro_batch))

    def _accumulate_rows(self, group: TrainingGroup, samples: slice) -> None:
        latents = group.trajectory.latents[samples]
        num_samples, num_steps = latents.shape[0], latents.shape[1] - 1
        device = next(iter(adapter_parameters(self.model.transformer).values())).device
        step = group.plan.step(group.trajectory.step_indices.repeat(num_samples))
        before = latents[:, :-1].flatten(0, 1).to(device)
        arrived = latents[:, 1:].flatten(0, 1).to(device)
        conditions = repeat_rows(group.conditions, len(before))
        sigma = step.sigma.to(device)

        velocity = self.model.velocity(before, sigma, conditions, guidance=self.guidance)
        taken = transition(velocity, before, step, arrived=arrived)
        advantage = group.advantages[samples].repeat_interleave(num_steps).to(taken.log_prob)
        surrogate = clipped_surrogate(
            taken.log_prob,
            group.trajectory.log_probs[samples].flatten().to(taken.log_prob),
            advantage,
            clip_range=self.algorithm.clip_range,
            advantage_clip=self.algorithm.advantage_clip,
        )
        per_row = surrogate.per_row
        if self.algorithm.kl_beta > 0:
            reference = self._reference_velocity(before, sigma, conditions)
            mean = transition(reference, before, step, arrived=arrived).mean
            divergence = reference_kl(taken, mean)
            per_row = per_row + self.algorithm.kl_beta * divergence
            self.tally.kl += float(divergence.detach().sum())
        loss = per_row.sum() / self.num_rows
        loss.backward()
        self._note(float(loss.detach()), surrogate.ratio, advantage)

    @torch.no_grad()
    def _reference_velocity(self, before: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """Of the base model: the same network without its adapter."""
        transformer: nn.Module = self.model.transformer
        transformer.disable_adapters()  # type: ignore[operator]
        try:
            return self.model.velocity(before, sigma, conditions, guidance=self.guidance)
        finally:
            transformer.enable_adapters()  # type: ignore[operator]

    def _note(self, loss: float, ratio: Tensor, advantage: Tensor) -> None:
        tally, clip = self.tally, self.algorithm.clip_range
        tally.num_rows += len(ratio)
        tally.loss += loss
        tally.ratio_sum += float(ratio.double().sum())
        tally.ratio_min = min(tally.ratio_min, float(ratio.min()))
        tally.ratio_max = max(tally.ratio_max, float(ratio.max()))
        tally.num_clipped_low += int(((ratio < 1 - clip) & (advantage < 0)).sum())
        tally.num_clipped_high += int(((ratio > 1 + clip) & (advantage > 0)).sum())
        tally.num_zero_advantage += int((advantage == 0).sum())
