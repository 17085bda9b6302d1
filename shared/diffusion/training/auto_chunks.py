"""Sums one batch's gradient in chunks whose sizes are measured until the best is known.

A size that does not fit is a measurement as well: the gradient is put back, and the group is
trained in smaller chunks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from shared.devices.chunks import Chunk, make_tuner
from shared.diffusion.loading.device import device_bytes, fits
from shared.diffusion.policy import LoadedPolicy
from shared.diffusion.training.gradient import GradientTransaction
from shared.diffusion.training.measurement import measured
from shared.diffusion.training.rows import TrainingGroup
from shared.diffusion.training.tally import Tally
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.errors import OutOfMemory
from shared.messages.workers import MemoryShortage
from shared.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class GradientBefore:
    """Holds a gradient in main memory, and what had happened to its rows, to go back to."""

    transaction: GradientTransaction
    parameters: Mapping[str, Tensor]
    """Those that the optimizer steps: the network's, or their masters."""
    gradients: Mapping[str, Tensor | None]
    tally: Tally

    @classmethod
    def save(cls, transaction: GradientTransaction, parameters: Mapping[str, Tensor]) -> Self:
        gradients = {
            name: None if parameter.grad is None else parameter.grad.detach().to("cpu", copy=True)
            for name, parameter in parameters.items()
        }
        return cls(transaction, parameters, gradients, replace(transaction.tally))

    @torch.no_grad()
    def restore(self) -> None:
        for name, current in trained_parameters(self.transaction.model.transformer).items():
            if current is not self.parameters[name]:
                current.grad = None  # on its way to the master
        for name, parameter in self.parameters.items():
            kept = self.gradients[name]
            if kept is None or parameter.grad is None:
                parameter.grad = None if kept is None else kept.to(parameter.device)
            else:
                parameter.grad.copy_(kept)
        self.transaction.tally = replace(self.tally)


MAX_SMALLEST_TRIES = 2
"""Number of attempts at the smallest size, in the first of which memory may lie in pieces."""


def describe_chunk(chunk: Chunk) -> str:
    return f"{chunk.samples} samples x {chunk.steps} steps"


REMEDY = (
    "make trainer.micro_batch or schedule.tsp_steps smaller, set trainer.gradient_checkpointing, "
    "or give trainer.memory_gib what the trainer may take"
)


class AutoChunkedGradient:
    """Sums gradients on one device in chunks that it has measured to be fast; later batches keep
    what was learned."""

    def __init__(
        self, recipe: Recipe, loaded: LoadedPolicy, num_samples: int | None = None
    ) -> None:
        """``num_samples`` is how much of a group is accumulated at a time; by default all of it."""
        self.transaction = GradientTransaction.from_recipe(recipe, loaded.model, loaded.sets)
        self._loaded = loaded
        self._num_samples = num_samples or recipe.trained_samples
        window = recipe.sampling.window
        self._usual_steps = {window, window - recipe.sampling.merged_steps}
        """Trained steps of a group, and of slices apart from its merged step."""
        self._whole = recipe.trained_samples
        self._trains_zeros = recipe.trains_zeros
        self._tuner = make_tuner(recipe, device_bytes(loaded.device), self._num_samples)
        self._is_shared = recipe.trainer.is_sharded
        """Whether several ranks take every pass together, in chunks that the first one chooses."""

    @property
    def chunk(self) -> Chunk:
        """Chunk in which the next group is trained."""
        return self._tuner.chunk

    def accumulate(self, group: TrainingGroup) -> MemoryShortage | None:
        """Add the gradient of a group, or of a part of one; return the first memory shortage.

        Samples without a gradient are left out, and counted as skipped. While sizes are tried, one
        that does not fit is a measurement: the gradient is as it was before, and the group is
        trained in smaller chunks.

        Raises:
            OutOfMemory: if the smallest size does not fit, or one that has fitted before, or the
                one that the recipe fixes. The batch then has to be begun again, for a part of
                    the
                gradient may be added already; the next chunks are smaller, if there are any.
        """
        with_gradient = self._with_gradient(group)
        if with_gradient is None:
            return None
        group, shortage, again = with_gradient, None, MAX_SMALLEST_TRIES
        while True:
            before = self._before_trial()
            try:
                self._try(group)
                return shortage
            except OutOfMemory as error:
                again -= not error.smaller
                if before is None or not again:
                    raise
                shortage = MemoryShortage.from_error(
                    error, f"passes of {describe_chunk(self.chunk)}"
                )
            before.restore()

    def _with_gradient(self, group: TrainingGroup) -> TrainingGroup | None:
        """Leaves out the samples whose gradient is zero, unless other ranks take the same passes;
        returns None if there is no other."""
        if self._is_shared or self._trains_zeros:
            return group
        picked, (samples, steps) = group.with_advantage(), group.shape
        num_left_out = samples - picked.shape[0]
        if not num_left_out or num_left_out == self._whole:
            return group  # of a whole group, somebody asks for what it measures
        self.transaction.leave_out(num_left_out * steps)
        return picked if picked.shape[0] else None

    def _before_trial(self) -> "GradientBefore | None":
        """Keeps the gradient while a size is tried, unless other ranks take the same passes."""
        if self._tuner.settled or self._is_shared:
            return None
        return GradientBefore.save(self.transaction, self._loaded.trained.parameters)

    def _try(self, group: TrainingGroup) -> None:
        chunk = self.chunk
        try:
            with fits(self._loaded.device, f"training {describe_chunk(chunk)} in one pass", REMEDY):
                self._accumulate(group, chunk)
        except OutOfMemory as error:
            before, self._tuner = self._tuner, self._tuner.without(chunk)
            smaller = self._tuner is not before
            raise OutOfMemory(
                str(error), smaller=smaller, what=error.what, remedy=error.remedy
            ) from None

    def _accumulate(self, group: TrainingGroup, chunk: Chunk) -> None:
        train = partial(self.transaction.accumulate, group, chunk)
        samples, steps = group.shape
        is_usual = samples >= chunk.samples and steps in self._usual_steps
        if self._tuner.settled or not is_usual:
            train()
            return
        network, device = self._loaded.model.transformer, self._loaded.device
        before = self.transaction.num_network_rows
        measurement = measured(train, chunk, network, device)
        rows = self.transaction.num_network_rows - before
        self._tuner = self._tuner.observe(replace(measurement, network_rows=max(1, rows)))
