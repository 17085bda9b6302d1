"""Composition of a batch, and the network's calls that it takes: counts, without any seconds."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from services.scheduler.costs.sizes import Positive
from shared.limits import MAX_GROUP_SIZE, MAX_PIECES
from shared.messages.records import Record

BACKWARD = 2
"""Forward passes that a backward pass counts as, where work is counted and not measured."""


class Shape(Record):
    """Composition of a batch."""

    groups: Positive
    group_size: Annotated[int, Field(gt=0, le=MAX_GROUP_SIZE)]
    steps: Positive
    """Denoising steps of a rollout."""
    trained_steps: Positive
    updates: Positive
    """Times that a batch runs the optimizer."""
    shared_steps: Annotated[float, Field(ge=0)] = 0.0
    """Denoising steps that a fragment computes once for all its samples, on average."""
    merged_steps: Annotated[int, Field(ge=0)] = 0
    """Trained steps that a group computes once for all its samples."""
    trained_samples: Annotated[int, Field(ge=0)] = 0
    """Samples of a group that are trained; 0: all."""
    most_pieces: Positive = MAX_PIECES
    """Pieces into which fluid devices divide the training of a batch, at most."""

    @property
    def samples(self) -> int:
        return self.groups * self.group_size

    @property
    def shared_share(self) -> float:
        """Share of the denoising steps that a fragment computes once."""
        return self.shared_steps / self.steps

    @property
    def trained_share(self) -> float:
        """Share of a group's samples that are trained."""
        return (self.trained_samples or self.group_size) / self.group_size

    def trained_rows(self, samples: int) -> float:
        """Return the mean number of rows in which this many samples of one group are trained."""
        apart = self.trained_steps - self.merged_steps
        return self.merged_steps + samples * self.trained_share * apart

    @property
    def rows_per_sample(self) -> float:
        """Trained rows per sample of a whole group: the trained steps, if none are merged."""
        return self.trained_rows(self.group_size) / self.group_size

    @model_validator(mode="after")
    def _parts_are_parts(self) -> Self:
        if self.shared_steps > self.steps:
            raise ValueError(f"shared_steps: {self.shared_steps} of {self.steps} steps")
        if self.merged_steps > self.trained_steps:
            raise ValueError(f"merged_steps: {self.merged_steps} of {self.trained_steps} trained")
        if self.trained_samples > self.group_size:
            raise ValueError(f"trained_samples: {self.trained_samples} of {self.group_size}")
        return self


def rollout_equivalents(shape: Shape, fragment: int) -> float:
    """Return the rows of the network per sample of a fragment of this size, without guidance."""
    return shape.steps - shape.shared_steps + shape.shared_steps / fragment


def training_equivalents(
    shape: Shape, *, forward_only_passes: float, differentiated: float = 1.0
) -> float:
    """Return the forward passes of a row that training a sample of a whole group counts as: one,
    the backward pass of the share of it that is ``differentiated``, and the
    ``forward_only_passes``, which have no backward pass."""
    return shape.rows_per_sample * (1 + BACKWARD * differentiated + forward_only_passes)
