"""Groups of stored denoising paths, whose rows are the stochastic steps that were taken.

Samples that began at one noise have one state, and one call of the network, at their first
stochastic step. The rows of a group that begin there at the same bytes are merged: the network
computes the state once, forward and backward, and every row has its own log-prob, ratio and
advantage by that. Only the bytes decide whether states are equal: fragments of different devices
may differ in the last bit, and then are not merged.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData
from shared.devices.slices import GroupSlice
from shared.diffusion.loading.device import to_device
from shared.diffusion.loading.models import Conditions, repeat_rows
from shared.diffusion.policy import sampling_plan
from shared.diffusion.sampling.sampler import Denoising, SamplingPlan, Trajectory
from shared.diffusion.sampling.tensors import (
    check_trajectory,
    pack_trajectory,
    unpack_conditions,
    unpack_trajectory,
)
from shared.diffusion.sampling.transition import NoiseStep
from shared.diffusion.training.rows import RowKind, check_alike, check_size, chunks
from shared.errors import ContractError
from shared.recipe.recipe import Recipe

SHARED_PART = 8
"""Shared states join a full chunk if it has this many rows for each: a call of the network costs
more than they do, and memory that is planned by chunks has space for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathGroup:
    """K stored denoising steps of each of the G samples of a group, and which of them are trained
    here: some samples, each at some of the N steps."""

    latents: Tensor
    """(G, K+1, ...) states: before each step, and after the last; (G, K, ...) without the one
    before the first, if samples share it."""
    starts: Tensor | None
    """(U, ...) unlike states that samples begin at, if they share them."""
    start_of: Tensor | None
    """(G,) which of these each sample begins at."""
    log_probs: Tensor
    """(G, K)"""
    means: Tensor | None
    """(G, K, ...)"""
    step_indices: Tensor
    """(K,) on the schedule."""
    trained: Tensor
    """(G, N) which of the K steps each sample is trained at, ascending."""
    advantages: Tensor
    """(G,)"""
    conditions: Conditions
    plan: SamplingPlan
    samples: Tensor
    """(S,) the trained samples among the G."""
    steps: range
    """The trained steps among the N."""
    staleness: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.samples), len(self.steps)

    @property
    def num_states(self) -> int:
        """Number of states that rows are merged at here; 0 if none are."""
        return 0 if self.starts is None or 0 not in self.steps else len(self.starts)

    def picked(self, samples: Sequence[int]) -> "PathGroup":
        chosen = self.samples[list(samples)]
        if self.starts is None or self.start_of is None:
            return replace(self, samples=chosen)
        used, place_of = self.start_of[chosen].unique(), torch.zeros(len(self.starts)).long()
        place_of[used] = torch.arange(len(used))
        start_of = place_of[self.start_of]
        return replace(self, samples=chosen, starts=self.starts[used], start_of=start_of)

    def with_advantage(self) -> "PathGroup":
        return self.picked(self.advantages[self.samples].nonzero().flatten().tolist())

    def sliced(self, group_slice: GroupSlice) -> "PathGroup":
        samples = self.samples[group_slice.samples.start : group_slice.samples.stop]
        steps = group_slice.steps(len(self.steps))
        return replace(self, samples=samples, steps=self.steps[steps.start : steps.stop])

    def rows(self, chunk: Chunk, device: torch.device) -> "Iterator[TransitionRows]":
        """Yields every row once: in chunks, and those that begin at shared states with the last of
        these, or in passes of their own where they do not fit it. A pass has as many rows of the
        network as a chunk at most, and an eighth more if they are states that are shared."""
        conditions = {name: to_device(each, device) for name, each in self.conditions.items()}
        here = replace(self, conditions=conditions)
        steps = self.steps
        if self.num_states and not bool(self.trained[self.samples, 0].any()):
            steps = steps[1:]  # the first is merged, of all samples
        cut = chunks((len(self.samples), len(steps)), chunk)
        apart = [here._unmerged(self.samples[samples], steps[inside]) for samples, inside in cut]
        apart = [each for each in apart if len(each[0])]
        room = max(chunk.rows - len(apart[-1][0]), chunk.rows // SHARED_PART) if apart else 0
        shares_last = 0 < self.num_states <= room
        for samples, places in apart[:-1] if shares_last else apart:
            yield here._rows(samples, places, device)
        if shares_last:
            yield here._with_merged(*apart[-1], device)
        else:
            yield from here._merged(chunk.rows, device)

    def _with_merged(
        self, samples: Tensor, places: Tensor, device: torch.device
    ) -> "TransitionRows":
        """Returns rows (B,) that begin each at its own state, and all that begin at shared ones: a
        call of the network costs more than the few states that it takes along."""
        assert self.starts is not None and self.start_of is not None
        merged = self._first_ones()
        own = torch.arange(len(samples))
        first = torch.zeros_like(merged)
        rows = self._rows(
            torch.cat([samples, merged]), torch.cat([places, first]), device,
            before=torch.cat([self._before(samples, places), self.starts]),
            at=torch.cat([places, first.new_zeros(len(self.starts))]),
        )  # fmt: skip
        state_of = torch.cat([own, len(own) + self.start_of[merged]])
        return replace(rows, state_of=to_device(state_of, device))

    def _merged(self, most: int, device: torch.device) -> "Iterator[TransitionRows]":
        """Yields the rows that begin at shared states, ``most`` states at a time.

        A state without rows here is computed all the same: ranks that share weights have to take
        the same passes, and each has samples of its own.
        """
        if self.starts is None or self.start_of is None or not self.num_states:
            return
        merged = self._first_ones()
        for first in range(0, len(self.starts), most):
            before = self.starts[first : first + most]
            state_of = self.start_of[merged] - first
            inside = (state_of >= 0) & (state_of < len(before))
            samples = merged[inside]
            at = torch.zeros(len(before), dtype=samples.dtype)
            places = torch.zeros_like(samples)
            rows = self._rows(samples, places, device, before=before, at=at)
            yield replace(rows, state_of=to_device(state_of[inside], device))

    def _first_ones(self) -> Tensor:
        """Returns the samples that are trained at the first of the K steps."""
        return self.samples[self.trained[self.samples, 0] == 0]

    def _unmerged(self, samples: Tensor, steps: range) -> tuple[Tensor, Tensor]:
        """Returns the rows (B,) that are not merged, the steps of a sample side by side: the sample
        of each, and its place among the K steps."""
        places = self.trained[samples][:, steps.start : steps.stop].flatten()
        each = samples.repeat_interleave(len(steps))
        return (each[places > 0], places[places > 0]) if self.num_states else (each, places)

    def _before(self, samples: Tensor, places: Tensor) -> Tensor:
        """Returns the states (B, ...) of samples before these places among the K steps."""
        return self.latents[samples, places - int(self.starts is not None)]

    def _rows(
        self,
        samples: Tensor,
        places: Tensor,
        device: torch.device,
        before: Tensor | None = None,
        at: Tensor | None = None,
    ) -> "TransitionRows":
        """Returns rows (B,) of these samples, at these places among the K steps. Where rows share
        states, these are ``before`` (U, ...), and stand ``at`` (U,) of the K steps."""
        after = places + (self.starts is None)
        step = self.plan.step(self.step_indices[places])
        if before is None:
            before = self._before(samples, places)
        sigma = step.sigma if at is None else self.plan.step(self.step_indices[at]).sigma
        put = partial(to_device, device=device)
        return TransitionRows(
            before=put(before),
            sigma=put(sigma),
            arrived=put(self.latents[samples, after]),
            step=replace(step, sigma=put(step.sigma), sigma_next=put(step.sigma_next)),
            behaviour_log_prob=put(self.log_probs[samples, places]),
            behaviour_mean=None if self.means is None else put(self.means[samples, places]),
            advantage=put(self.advantages[samples]),
            conditions=repeat_rows(self.conditions, len(before)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionRows:
    """Holds B rows, which begin at U states: each at its own, or several at one."""

    before: Tensor
    """(U, ...) unlike states."""
    sigma: Tensor
    """(U,) where these stand."""
    conditions: Conditions
    """Conditioning of U rows of the network."""
    state_of: Tensor | None = None
    """(B,) the state that each row begins at; without it, U is B, and each has its own."""
    arrived: Tensor
    """(B, ...)"""
    step: NoiseStep
    behaviour_log_prob: Tensor
    """(B,)"""
    behaviour_mean: Tensor | None
    """(B, ...) mean of the Gaussian that ``arrived`` was drawn from, if the algorithm needs it."""
    advantage: Tensor
    """(B,)"""

    def of_rows(self, values: Tensor) -> Tensor:
        """Returns for each row (B, ...) what belongs to its state, of ``values`` (U, ...)."""
        return values if self.state_of is None else values[self.state_of]

    def velocities(self, network: Callable[[Tensor, Tensor, Conditions], Tensor]) -> Tensor:
        """Returns the velocity of each row (B, ...), by one row of the network for each state."""
        return self.of_rows(network(self.before, self.sigma, self.conditions))


def check_path(recipe: Recipe, path: Trajectory) -> None:
    """Raises ContractError unless a path covers a window of the recipe's noise schedule."""
    plan = sampling_plan(recipe, window_start=0)
    num_steps = len(plan.sigmas) - 1
    indices = path.step_indices.tolist()
    if len(indices) != len(plan.window):
        raise ContractError("a trajectory does not hold the window that the recipe trains")
    first = indices[0]
    last = num_steps - 1 - len(indices)  # noise of the last step would stay in the sample
    if indices != list(range(first, first + len(indices))) or not 0 <= first <= last:
        raise ContractError(f"steps {indices} are no window of {num_steps} steps")
    sigmas = path.sigmas.new_tensor(plan.sigmas)
    if path.sigmas.shape != sigmas.shape or bool((path.sigmas != sigmas).any()):
        raise ContractError("a trajectory was generated with other sigmas than the recipe's")
    if (path.means is not None) != plan.keeps_means:
        raise ContractError("a trajectory does not hold what the algorithm needs of it: means")
    drawn = None if path.trained is None else path.trained.shape[1]
    if drawn != plan.num_drawn:
        raise ContractError(f"samples are trained at {drawn} drawn steps, not {plan.num_drawn}")
    shares = recipe.sampling.shared_noise and (first == 0 or not plan.all_stochastic)
    if (path.start is not None) != shares:
        raise ContractError("a trajectory has a shared start where samples have none, or has none")


def read_paths(recipe: Recipe, data: GroupData) -> PathGroup:
    """Reads a group from its stored fragments.

    Raises:
        ContractError: if the fragments do not make up a group of this run.
    """
    paths = [unpack_trajectory(each) for each in data.trajectories]
    for path in paths:
        check_path(recipe, path)
    first = paths[0]
    check_alike([path.latents for path in paths])
    if any(not torch.equal(path.step_indices, first.step_indices) for path in paths):
        raise ContractError("fragments of one group do not share their steps")
    size = sum(len(path.log_probs) for path in paths)
    check_size(size, data)
    starts, start_of = merged_starts(paths)
    trained = _joined([path.trained for path in paths])
    if trained is None:
        trained = torch.arange(len(first.step_indices)).expand(size, -1)
    return PathGroup(
        latents=torch.cat([path.latents for path in paths]),
        starts=starts,
        start_of=start_of,
        log_probs=torch.cat([path.log_probs for path in paths]),
        means=_joined([path.means for path in paths]),
        step_indices=first.step_indices,
        trained=trained,
        advantages=torch.tensor(data.advantages, dtype=torch.float64),
        conditions=unpack_conditions(data.conditions),
        plan=sampling_plan(recipe, window_start=0),
        samples=torch.arange(size),
        steps=range(trained.shape[1]),
        staleness=data.staleness,
    )


def merged_starts(paths: Sequence[Trajectory]) -> tuple[Tensor | None, Tensor | None]:
    """Returns the unlike states (U, ...) that fragments of a group begin at, and which of them each
    sample (G,) begins at; None if every sample has its own.

    States are the same if their bytes are: a difference in one bit keeps fragments apart.
    """
    starts: list[Tensor] = []
    places: dict[bytes, int] = {}
    start_of: list[int] = []
    for path in paths:
        if path.start is None:
            return None, None
        digest = hashlib.sha256(path.start.view(torch.uint8).numpy().tobytes()).digest()
        if digest not in places:
            places[digest] = len(starts)
            starts.append(path.start)
        start_of += [places[digest]] * len(path.log_probs)
    return torch.cat(starts), torch.tensor(start_of)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Joins tensors (n, ...) of all fragments, which have them or not (`check_path`)."""
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None


def _pack_path(denoising: Denoising, seeds: Sequence[int]) -> bytes:
    path = denoising.trajectory()
    check_trajectory(path)
    return pack_trajectory(path)


def _count_path(recipe: Recipe, stored: bytes) -> int:
    path = unpack_trajectory(stored)
    check_path(recipe, path)
    return len(path.log_probs)


PATHS = RowKind(_pack_path, _count_path, read_paths)
