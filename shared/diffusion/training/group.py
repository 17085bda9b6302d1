"""A whole group as the trainer sees it, and the rows that it is cut into."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.diffusion.models import Conditions, repeat_rows
from shared.diffusion.policy import sampling_plan
from shared.diffusion.sampler import SamplingPlan, Trajectory
from shared.diffusion.tensors import unpack, unpack_trajectory
from shared.diffusion.training.chunks import Chunk
from shared.diffusion.transition import Step
from shared.errors import ContractError
from shared.pieces import Cut
from shared.recipe import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingGroup:
    """A whole group, or a part of one, ready to train. G samples, K trained steps."""

    trajectory: Trajectory
    advantages: Tensor
    """(G,)"""
    conditions: Conditions
    plan: SamplingPlan
    staleness: int = 0
    """Batch number minus the policy version that generated it; 0 is on-policy."""

    def piece(self, cut: Cut) -> "TrainingGroup":
        """Some of its samples and steps, without copying."""
        path = self.trajectory
        samples = slice(cut.samples.start, cut.samples.stop)
        steps = cut.steps(path.log_probs.shape[1])
        return replace(
            self,
            trajectory=replace(
                path,
                latents=path.latents[samples, steps.start : steps.stop + 1],
                log_probs=path.log_probs[samples, steps.start : steps.stop],
                step_indices=path.step_indices[steps.start : steps.stop],
            ),
            advantages=self.advantages[samples],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A chunk of a group on the device: B samples x steps, the steps of a sample side by side."""

    before: Tensor
    """(B, ...)"""
    arrived: Tensor
    """(B, ...)"""
    step: Step
    behaviour_log_prob: Tensor
    """(B,)"""
    advantage: Tensor
    """(B,)"""
    conditions: Conditions
    """A row each."""


def cut(group: TrainingGroup, chunk: Chunk, device: torch.device) -> Iterator[Rows]:
    """Every row of the group once."""
    num_samples, num_steps = group.trajectory.log_probs.shape
    conditions = {name: tensor.to(device) for name, tensor in group.conditions.items()}
    for sample in range(0, num_samples, chunk.samples):
        for step in range(0, num_steps, chunk.steps):
            samples = slice(sample, min(sample + chunk.samples, num_samples))
            steps = slice(step, min(step + chunk.steps, num_steps))
            yield _rows(group, samples, steps, conditions, device)


def _rows(
    group: TrainingGroup, samples: slice, steps: slice, conditions: Conditions, device: torch.device
) -> Rows:
    path = group.trajectory
    latents = path.latents[samples, steps.start : steps.stop + 1]
    num_samples, num_steps = latents.shape[0], latents.shape[1] - 1
    return Rows(
        before=latents[:, :-1].flatten(0, 1).to(device),
        arrived=latents[:, 1:].flatten(0, 1).to(device),
        step=group.plan.step(path.step_indices[steps].repeat(num_samples)),
        behaviour_log_prob=path.log_probs[samples, steps].flatten().to(device),
        advantage=group.advantages[samples].repeat_interleave(num_steps).to(device),
        conditions=repeat_rows(conditions, num_samples * num_steps),
    )


def read_group(
    sampling: Sampling,
    trajectories: Sequence[bytes],
    conditions: bytes,
    advantages: Sequence[float],
    staleness: int,
) -> TrainingGroup:
    """A group from its stored fragments, given in order.

    Raises:
        ContractError: if the fragments do not make up a group of this run.
    """
    trajectory = _joined([unpack_trajectory(data) for data in trajectories], sampling)
    if len(trajectory.log_probs) != len(advantages):
        raise ContractError(
            f"a group of {len(trajectory.log_probs)} samples has {len(advantages)} advantages"
        )
    return TrainingGroup(
        trajectory=trajectory,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        conditions=unpack(conditions),
        plan=sampling_plan(sampling, window_start=0),
        staleness=staleness,
    )


def _joined(parts: Sequence[Trajectory], sampling: Sampling) -> Trajectory:
    first = parts[0]
    sigmas = torch.tensor(sampling_plan(sampling, window_start=None).sigmas)
    for part in parts:
        same_steps = torch.equal(part.step_indices, first.step_indices)
        if not same_steps or not torch.equal(part.sigmas, sigmas):
            raise ContractError("fragments of one group do not share their steps and sigmas")
    if len(first.step_indices) != sampling.window:
        raise ContractError("a trajectory does not hold the window that the recipe trains")
    return Trajectory(
        latents=torch.cat([part.latents for part in parts]),
        log_probs=torch.cat([part.log_probs for part in parts]),
        step_indices=first.step_indices,
        sigmas=first.sigmas,
    )
