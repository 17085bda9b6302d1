"""Rows that an algorithm is trained on, and how they are made from rollout's stored samples.

A row is one sample at one trained step. Its content depends on the algorithm: a denoising step that
was taken (`training.group`), or a finished sample with new noise (`training.forward_process`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData
from shared.devices.slices import GroupSlice
from shared.diffusion.sampling.sampler import Denoising
from shared.diffusion.sampling.tensors import unpack_conditions
from shared.errors import ContractError
from shared.learning.advantages import best_and_worst
from shared.learning.algorithms import ALGORITHMS
from shared.recipe.recipe import Recipe


class Rows(Protocol):
    """A chunk of a group on the device: B samples x steps, the steps of a sample side by side."""

    @property
    def advantage(self) -> Tensor:
        """(B,)"""


class TrainingGroup(Protocol):
    """A whole group, or a part of one, ready for training."""

    @property
    def staleness(self) -> int:
        """Batch number minus the policy version that generated it; 0 is on-policy."""

    @property
    def shape(self) -> tuple[int, int]:
        """Samples and trained steps."""

    def picked(self, samples: Sequence[int]) -> "TrainingGroup":
        """These samples alone."""

    def with_advantage(self) -> "TrainingGroup":
        """Samples whose advantage is not 0, if there are any, at the same steps."""

    def sliced(self, group_slice: GroupSlice) -> "TrainingGroup":
        """Some of its samples and steps, without copying."""

    def rows(self, chunk: Chunk, device: torch.device) -> Iterator[Rows]:
        """Every row once."""


@runtime_checkable
class MergesRows(Protocol):
    """A group whose rows the network computes together where they begin at one state."""

    @property
    def num_states(self) -> int:
        """Number of unlike states that its merged rows begin at; 0 if it has none."""


@dataclass(frozen=True, slots=True)
class RowKind:
    """How samples are stored by rollout, and read by the trainer."""

    pack: Callable[[Denoising, Sequence[int]], bytes]
    """Packs samples that are denoised, given their seeds, for the store."""
    count: Callable[[Recipe, bytes], int]
    """Return the number of samples of a stored fragment; raises ContractError if it does not fit
    the recipe."""
    read: Callable[[Recipe, GroupData], TrainingGroup]
    """Makes a group of its stored fragments; raises ContractError if they do not make up one."""


def row_kind(recipe: Recipe) -> RowKind:
    """Returns the kind of rows that the recipe's algorithm trains."""
    kind: RowKind = resolve_name(ALGORITHMS[recipe.algorithm.name].rows)
    return kind


def check_stored(recipe: Recipe, trajectory: bytes, conditions: bytes, num_samples: int) -> None:
    """Raises ContractError unless the data fit the recipe's training of this many samples.
    Fragments are checked one by one, so that a faulty one is regenerated and the others are
    kept."""
    counted = row_kind(recipe).count(recipe, trajectory)
    if counted != num_samples:
        raise ContractError(f"a fragment of {num_samples} samples holds {counted}")
    unpack_conditions(conditions)


def read_group(recipe: Recipe, data: GroupData) -> TrainingGroup:
    """Reads the samples of a group that are trained (`algorithm.best_of`).

    Raises:
        ContractError: if the fragments do not make up a group of this run.
    """
    number, group = recipe.algorithm.best_of, row_kind(recipe).read(recipe, data)
    return group if number is None else group.picked(best_and_worst(data.advantages, number))


def chunks(shape: tuple[int, int], chunk: Chunk) -> Iterator[tuple[slice, slice]]:
    """Slices of samples and of steps, which together are all of them."""
    num_samples, num_steps = shape
    for sample in range(0, num_samples, chunk.samples):
        for step in range(0, num_steps, chunk.steps):
            yield (
                slice(sample, min(sample + chunk.samples, num_samples)),
                slice(step, min(step + chunk.steps, num_steps)),
            )


def check_alike(samples: Sequence[Tensor]) -> None:
    """Raises ContractError unless all fragments hold samples of one shape and type."""
    kinds = {(each.shape[1:], each.dtype) for each in samples}
    if len(kinds) > 1:
        raise ContractError(f"fragments of one group differ: {sorted(map(str, kinds))}")


def check_size(num_samples: int, data: GroupData) -> None:
    """Raises ContractError unless there is an advantage for each sample."""
    if num_samples != len(data.advantages):
        raise ContractError(
            f"a group of {num_samples} samples has {len(data.advantages)} advantages"
        )
