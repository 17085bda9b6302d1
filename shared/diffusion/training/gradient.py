"""One batch's gradient as a transaction: begin, accumulate groups in any order, then step or abort.

TSP: samples and denoising steps are flattened into rows, sample by sample, so that one forward and
backward pass trains several steps of several samples, whatever fragments they came from. The last
chunk may be smaller, in samples and in steps: rows carry the batch's denominator.

A sample without advantage has no gradient unless there is a KL term: it need not be trained.

Advantages may be centred only, until the standard deviation of the batch is known: then what is in
proportion to them is summed apart from all else (`training.sums`). Both gradients come from one
forward pass where the graph may be walked twice; where activations are computed again, or weights
gathered, each has a forward pass of its own.

Between two groups others may use the network, with the same weights and without gradients: the
state that a pass needs is set before each group.

The sizes of its chunks are measured while it goes on, until the best is known.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from shared.devices.chunks import Chunk, make_tuner
from shared.devices.protocols import AdvantageKind
from shared.diffusion.device import device_bytes, fits
from shared.diffusion.models import Conditions, ModelAdapter, taken
from shared.diffusion.policy import LoadedPolicy
from shared.diffusion.training.measurement import measured
from shared.diffusion.training.objective import Behaviour, LossTerms, evaluate
from shared.diffusion.training.rows import MergesRows, Rows, TrainingGroup
from shared.diffusion.training.sums import Rest
from shared.diffusion.training.tally import Tally
from shared.diffusion.weights import trained_parameters
from shared.diffusion.weights_beside import WeightsBeside
from shared.errors import OutOfMemory, Untrainable
from shared.messages.workers import MemoryShortage
from shared.recipe.recipe import Recipe
from shared.recipe.sampling import Algorithm


@dataclass(slots=True)
class GradientTransaction:
    """Sums the gradient of one batch in the ``grad`` of the trained parameters."""

    model: ModelAdapter
    algorithm: Algorithm
    num_rows: int
    """Rows of an optimizer step: the one denominator of every row's loss."""
    guidance: float
    largest_weight: float | None = None
    """`Tables.largest_weight`"""
    beside: WeightsBeside | None = None
    """Weights of the policy that generated, if they may be others."""
    tally: Tally = field(default_factory=Tally)
    """Metrics of the rows that were trained."""
    num_skipped: int = 0
    """Number of rows that were not trained, because their gradient is zero."""
    num_steps: int = 0
    """Number of optimizer steps since the batch began."""
    num_network_rows: int = 0
    """Number of rows that the network has computed with a gradient, ever."""
    _adapter: list[Any] | None = None
    """The adapter's layers, once they are known: looking for them takes a small pass's time."""
    kind: AdvantageKind = "final"
    """What advantages are, where a group does not say it."""
    one_forward: bool = True
    """Whether two backward passes may follow one forward pass."""
    rest: Rest = field(default_factory=Rest)
    """Gradient of what does not depend on advantages, while these are centred only."""

    @classmethod
    def of(
        cls, recipe: Recipe, model: ModelAdapter, beside: WeightsBeside | None = None
    ) -> "GradientTransaction":
        rows = recipe.batch.groups * recipe.trained_samples * recipe.sampling.window
        return cls(
            model=model,
            algorithm=recipe.algorithm,
            num_rows=rows // recipe.trainer.updates,
            guidance=recipe.model.guidance,
            largest_weight=recipe.largest_weight,
            beside=beside,
            kind="centred" if recipe.batch_std == "late" else "final",
            one_forward=not (recipe.trainer.gradient_checkpointing or recipe.trainer.sharded),
        )

    def begin(self) -> None:
        for parameter in trained_parameters(self.model.transformer).values():
            parameter.grad = None
        self.rest = Rest()
        self.tally = Tally()
        self.num_skipped = 0
        self.num_steps = 0

    def skip(self, num_rows: int) -> None:
        """Leaves out rows whose gradient is zero; may be called beside `accumulate`."""
        self.num_skipped += num_rows

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of all rows, skipped ones included."""
        everything = replace(self.tally)
        everything.skip(self.num_skipped)
        return everything.metrics()

    def check(self) -> None:
        """Raises BatchFailed if the rows so far are not what these weights can be trained on."""
        if self.largest_weight is None:
            self.tally.check_on_policy()
        else:
            self.tally.check_weights(self.largest_weight)

    def accumulate(
        self, group: TrainingGroup, chunk: Chunk, kind: AdvantageKind | None = None
    ) -> None:
        """Adds the gradient of one group, or a part of one, a chunk at a time.

        Raises:
            Untrainable: if the network cannot take its tensors.
        """
        network = self.model.transformer
        network.eval()  # as it samples: a replay equals its sample
        self._enable_adapter(True)
        device = next(each.device for each in network.parameters() if each.requires_grad)
        if isinstance(group, MergesRows) and kind != "excess":
            self.tally.note_states(group.num_states)
        for rows in group.rows(chunk, device):
            with torch.enable_grad():
                self._accumulate_rows(rows, group.staleness + self.num_steps, kind or self.kind)

    def _accumulate_rows(self, rows: Rows, staleness: int, kind: AdvantageKind) -> None:
        def evaluated(algorithm: Algorithm) -> LossTerms:
            with taken(Untrainable):
                behaviour = Behaviour(staleness == 0, self.largest_weight)
                return evaluate(algorithm, rows, self, behaviour)

        if kind == "excess":
            self.tally.loss += self._backward(-evaluated(self._alone).surrogate.per_row)
            return
        found = evaluated(self.algorithm if kind == "centred" else self._with_the_clip)
        per_row, rest = found.surrogate.per_row, found.rest(self.algorithm.kl_beta)
        if rest is None or kind == "final":
            self.tally.loss += self._backward(per_row if rest is None else per_row + rest)
        else:
            again = None if self.one_forward else lambda: evaluated(self._alone).surrogate.per_row
            self._backward_apart(per_row, rest, again)
        if found.divergence is not None:
            self.tally.kl += float(found.divergence.detach().sum())
        self.tally.record(
            found.surrogate,
            rows.advantage,
            clip_range=self.algorithm.clip_range,
            staleness=staleness,
        )

    def _backward(self, per_row: Tensor, *, is_first: bool = False) -> float:
        """Adds the gradient of a loss per row (B,); returns the loss. ``is_first``: another one of
        the same graph follows."""
        loss = per_row.sum() / self.num_rows
        if loss.requires_grad:  # not where all rows are of a network that is not trained
            loss.backward(retain_graph=is_first)
        return float(loss.detach())

    def _backward_apart(
        self, per_row: Tensor, rest: Tensor, again: Callable[[], Tensor] | None
    ) -> None:
        """Adds both gradients of the two parts (B,) of a loss, each to its sum. ``again`` computes
        the first part by a forward pass of its own, if it has to have one."""
        if again is None:
            self.tally.loss += self._backward(per_row, is_first=True)
        with self.rest.taking(trained_parameters(self.model.transformer)):
            self.tally.rest_loss += self._backward(rest)
        if again is not None:
            self.tally.loss += self._backward(again())

    def join(self, parameters: Mapping[str, nn.Parameter], scale: float) -> None:
        """Makes one gradient of the two sums, in the ``grad`` fields of what the optimizer steps:
        what is in proportion to the advantages, times ``scale``, and all else."""
        self.rest.join(parameters, scale)
        self.tally.loss = scale * self.tally.loss + self.tally.rest_loss
        self.tally.rest_loss = 0.0

    @property
    def _alone(self) -> Algorithm:
        """The algorithm of what is in proportion to the advantages."""
        return self.algorithm.model_copy(update={"kl_beta": 0.0})

    @property
    def _with_the_clip(self) -> Algorithm:
        """The algorithm of advantages that are divided by their standard deviation."""
        if self.algorithm.advantage_std == "group":
            return self.algorithm
        return self.algorithm.model_copy(update={"advantage_std": "group"})

    def velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """Returns velocities (B, ...) from latents (B, ...), sigma (B,), conditions of B rows."""
        self.num_network_rows += len(latents) * torch.is_grad_enabled()
        sigma = sigma.to(latents.device)
        return self.model.velocity(latents, sigma, conditions, guidance=self.guidance)

    @torch.no_grad()
    def old_velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor | None:
        """Returns velocities (B, ...) by the weights that lie beside the network's; None if they
        are the same."""
        if self.beside is None or not self.beside.differ:
            return None
        with self.beside.in_use():
            return self.velocity(latents, sigma, conditions)

    @torch.no_grad()
    def reference_velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """Returns the base model's velocities (B, ...): the same network's without its adapter."""
        self._enable_adapter(False)
        try:
            return self.velocity(latents, sigma, conditions)
        finally:
            self._enable_adapter(True)

    def _enable_adapter(self, enabled: bool) -> None:
        """Switches the adapter; its parameters require gradients only while it is on."""
        if self._adapter is None:
            from peft.tuners.tuners_utils import BaseTunerLayer

            modules = self.model.transformer.modules()
            self._adapter = [each for each in modules if isinstance(each, BaseTunerLayer)]
        for layer in self._adapter:
            layer.enable_adapters(enabled)


@dataclass(frozen=True, slots=True)
class GradientBefore:
    """Holds a gradient in main memory, and what had happened to its rows, to go back to."""

    transaction: GradientTransaction
    parameters: Mapping[str, Tensor]
    """Those that the optimizer steps: the network's, or their masters."""
    gradients: Mapping[str, Tensor | None]
    rest: Mapping[str, Tensor]
    """What does not depend on advantages, of the network's parameters."""
    tally: Tally

    @classmethod
    def of(cls, transaction: GradientTransaction, parameters: Mapping[str, Tensor]) -> Self:
        gradients = {
            name: None if parameter.grad is None else parameter.grad.detach().to("cpu", copy=True)
            for name, parameter in parameters.items()
        }
        rest = {n: t.to("cpu", copy=True) for n, t in transaction.rest.gradients.items()}
        return cls(transaction, parameters, gradients, rest, replace(transaction.tally))

    @torch.no_grad()
    def restore(self) -> None:
        for name, held in trained_parameters(self.transaction.model.transformer).items():
            if held is not self.parameters[name]:
                held.grad = None  # on its way to the master
        for name, parameter in self.parameters.items():
            kept = self.gradients[name]
            if kept is None or parameter.grad is None:
                parameter.grad = None if kept is None else kept.to(parameter.device)
            else:
                parameter.grad.copy_(kept)
        sums = self.transaction.rest.gradients
        self.transaction.rest = Rest({
            name: sums[name].copy_(kept) for name, kept in self.rest.items()
        })  # fmt: skip
        self.transaction.tally = replace(self.tally)


TRIES_OF_SMALLEST = 2
"""Number of attempts at the smallest size, in the first of which memory may lie in pieces."""


def words_of(chunk: Chunk) -> str:
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
        self.transaction = GradientTransaction.of(recipe, loaded.model, loaded.beside)
        self._loaded = loaded
        self._num_samples = num_samples or recipe.trained_samples
        window = recipe.sampling.window
        self._usual_steps = {window, window - recipe.sampling.merged_steps}
        """Trained steps of a group, and those of slices beside its merged step."""
        self._whole = recipe.trained_samples
        self._trains_zeros = recipe.trains_zeros
        self._tuner = make_tuner(recipe, device_bytes(loaded.device), self._num_samples)
        self._is_shared = recipe.trainer.sharded
        """Whether several ranks take every pass together, in chunks that the first one says."""

    @property
    def chunk(self) -> Chunk:
        """Chunk in which the next group is trained."""
        return self._tuner.chunk

    def accumulate(
        self, group: TrainingGroup, kind: AdvantageKind | None = None
    ) -> MemoryShortage | None:
        """Adds the gradient of a group, or of a part of one; returns what did not fit at first.

        Samples without a gradient are left out, and counted as skipped. While sizes are tried, one
        that does not fit is a measurement: the gradient is as it was before, and the group is
        trained in smaller chunks.

        Raises:
            OutOfMemory: if the smallest size does not fit, or one that has fitted before, or the
                one that the recipe fixes. The batch then has to be begun again, for a part of the
                gradient may be added already; the next chunks are smaller, if there are any.
        """
        with_gradient = self._with_gradient(group, kind)
        if with_gradient is None:
            return None
        group, shortage, again = with_gradient, None, TRIES_OF_SMALLEST
        while True:
            before = self._before_trial()
            try:
                self._try(group, kind)
                return shortage
            except OutOfMemory as error:
                again -= not error.smaller
                if before is None or not again:
                    raise
                shortage = MemoryShortage.of(error, f"passes of {words_of(self.chunk)}")
            before.restore()

    def _with_gradient(
        self, group: TrainingGroup, kind: AdvantageKind | None
    ) -> TrainingGroup | None:
        """Leaves out the samples whose gradient is zero, unless other ranks take the same passes;
        returns None if there is no other."""
        if self._is_shared or (self._trains_zeros and kind != "excess"):
            return group
        picked, (samples, steps) = group.with_advantage(), group.shape
        num_left_out = samples - picked.shape[0]
        if not num_left_out or num_left_out == self._whole:
            return group  # of a whole group, somebody asks for what it measures
        if kind != "excess":
            self.transaction.tally.skip(num_left_out * steps)
        return picked if picked.shape[0] else None

    def _before_trial(self) -> "GradientBefore | None":
        """Keeps the gradient while a size is tried, unless other ranks take the same passes."""
        if self._tuner.settled or self._is_shared:
            return None
        return GradientBefore.of(self.transaction, self._loaded.trained.parameters)

    def _try(self, group: TrainingGroup, kind: AdvantageKind | None) -> None:
        chunk = self.chunk
        try:
            with fits(self._loaded.device, f"training {words_of(chunk)} in one pass", REMEDY):
                self._accumulate(group, chunk, kind)
        except OutOfMemory as error:
            before, self._tuner = self._tuner, self._tuner.without(chunk)
            smaller = self._tuner is not before
            raise OutOfMemory(
                str(error), smaller=smaller, what=error.what, remedy=error.remedy
            ) from None

    def _accumulate(self, group: TrainingGroup, chunk: Chunk, kind: AdvantageKind | None) -> None:
        train = partial(self.transaction.accumulate, group, chunk, kind)
        samples, steps = group.shape
        is_usual = samples >= chunk.samples and steps in self._usual_steps
        is_usual = is_usual and kind in (None, self.transaction.kind)
        if self._tuner.settled or not is_usual:
            train()
            return
        network, device = self._loaded.model.transformer, self._loaded.device
        before = self.transaction.num_network_rows
        found = measured(train, chunk, network, device)
        rows = self.transaction.num_network_rows - before
        self._tuner = self._tuner.observe(replace(found, network_rows=max(1, rows)))
