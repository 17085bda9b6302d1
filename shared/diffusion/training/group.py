"""Groups of stored denoising paths, whose rows are the stochastic steps that were taken."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData
from shared.devices.slices import GroupSlice
from shared.diffusion.models import Conditions, repeat_rows
from shared.diffusion.policy import sampling_plan
from shared.diffusion.sampler import Denoising, SamplingPlan, Trajectory
from shared.diffusion.tensors import (
    check_trajectory,
    pack_trajectory,
    unpack_conditions,
    unpack_trajectory,
)
from shared.diffusion.training.rows import RowKind, check_alike, check_size, chunks
from shared.diffusion.transition import Step
from shared.errors import ContractError
from shared.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class PathGroup:
    """Holds K denoising steps that were taken of each of G samples."""

    trajectory: Trajectory
    advantages: Tensor
    """(G,)"""
    conditions: Conditions
    plan: SamplingPlan
    staleness: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        samples, steps = self.trajectory.log_probs.shape
        return samples, steps

    def picked(self, samples: Sequence[int]) -> "PathGroup":
        path, these = self.trajectory, list(samples)
        return replace(
            self,
            trajectory=replace(
                path,
                latents=path.latents[these],
                log_probs=path.log_probs[these],
                means=None if path.means is None else path.means[these],
            ),
            advantages=self.advantages[these],
        )

    def sliced(self, group_slice: GroupSlice) -> "PathGroup":
        path = self.trajectory
        samples = slice(group_slice.samples.start, group_slice.samples.stop)
        inside = group_slice.steps(self.shape[1])
        steps = slice(inside.start, inside.stop)
        return replace(
            self,
            trajectory=replace(
                path,
                latents=path.latents[samples, steps.start : steps.stop + 1],
                log_probs=path.log_probs[samples, steps],
                step_indices=path.step_indices[steps],
                means=None if path.means is None else path.means[samples, steps],
            ),
            advantages=self.advantages[samples],
        )

    def rows(self, chunk: Chunk, device: torch.device) -> "Iterator[TransitionRows]":
        conditions = {name: tensor.to(device) for name, tensor in self.conditions.items()}
        for samples, steps in chunks(self.shape, chunk):
            yield self._rows(samples, steps, conditions, device)

    def _rows(
        self, samples: slice, steps: slice, conditions: Conditions, device: torch.device
    ) -> "TransitionRows":
        path = self.trajectory
        latents = path.latents[samples, steps.start : steps.stop + 1]
        num_samples, num_steps = latents.shape[0], latents.shape[1] - 1
        means = None if path.means is None else path.means[samples, steps].flatten(0, 1)
        return TransitionRows(
            before=latents[:, :-1].flatten(0, 1).to(device),
            arrived=latents[:, 1:].flatten(0, 1).to(device),
            step=self.plan.step(path.step_indices[steps].repeat(num_samples)),
            behaviour_log_prob=path.log_probs[samples, steps].flatten().to(device),
            behaviour_mean=None if means is None else means.to(device),
            advantage=self.advantages[samples].repeat_interleave(num_steps).to(device),
            conditions=repeat_rows(conditions, num_samples * num_steps),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionRows:
    before: Tensor
    """(B, ...)"""
    arrived: Tensor
    """(B, ...)"""
    step: Step
    behaviour_log_prob: Tensor
    """(B,)"""
    behaviour_mean: Tensor | None
    """(B, ...) mean of the Gaussian that ``arrived`` was drawn from, if the algorithm needs it."""
    advantage: Tensor
    """(B,)"""
    conditions: Conditions
    """Conditioning of B rows."""


def check_path(recipe: Recipe, path: Trajectory) -> None:
    """Raises ContractError unless a path covers a window of the recipe's noise schedule."""
    plan = sampling_plan(recipe, window_start=0)
    indices = path.step_indices.tolist()
    if len(indices) != recipe.sampling.window:
        raise ContractError("a trajectory does not hold the window that the recipe trains")
    first = indices[0]
    last = len(plan.sigmas) - 2 - len(indices)  # noise of the last step would stay in the sample
    if indices != list(range(first, first + len(indices))) or not 0 <= first <= last:
        raise ContractError(f"steps {indices} are no window of {len(plan.sigmas) - 1} steps")
    sigmas = path.sigmas.new_tensor(plan.sigmas)
    if path.sigmas.shape != sigmas.shape or bool((path.sigmas != sigmas).any()):
        raise ContractError("a trajectory was generated with other sigmas than the recipe's")
    if (path.means is not None) != plan.keeps_means:
        raise ContractError("a trajectory does not hold what the algorithm needs of it: means")


def read_paths(recipe: Recipe, data: GroupData) -> PathGroup:
    """Reads a group from its stored fragments.

    Raises:
        ContractError: if the fragments do not make up a group of this run.
    """
    plan = sampling_plan(recipe, window_start=0)
    paths = [unpack_trajectory(each) for each in data.trajectories]
    for path in paths:
        check_path(recipe, path)
    trajectory = _joined(paths, plan)
    check_size(len(trajectory.log_probs), data)
    return PathGroup(
        trajectory=trajectory,
        advantages=torch.tensor(data.advantages, dtype=torch.float64),
        conditions=unpack_conditions(data.conditions),
        plan=plan,
        staleness=data.staleness,
    )


def _joined(parts: Sequence[Trajectory], plan: SamplingPlan) -> Trajectory:
    first = parts[0]
    check_alike([part.latents for part in parts])
    if any(not torch.equal(part.step_indices, first.step_indices) for part in parts):
        raise ContractError("fragments of one group do not share their steps")
    return Trajectory(
        latents=torch.cat([part.latents for part in parts]),
        log_probs=torch.cat([part.log_probs for part in parts]),
        step_indices=first.step_indices,
        sigmas=first.sigmas,
        means=torch.cat([part.means for part in parts if part.means is not None])
        if plan.keeps_means
        else None,
    )


def _pack_path(denoising: Denoising, seeds: Sequence[int]) -> bytes:
    path = denoising.trajectory()
    check_trajectory(path)
    return pack_trajectory(path)


def _count_path(recipe: Recipe, stored: bytes) -> int:
    path = unpack_trajectory(stored)
    check_path(recipe, path)
    return len(path.log_probs)


PATHS = RowKind(_pack_path, _count_path, read_paths)
