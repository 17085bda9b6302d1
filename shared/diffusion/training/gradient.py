"""One batch's gradient as a transaction: begin, accumulate groups in any order, then step or abort.

TSP: samples and denoising steps are flattened into rows, sample by sample, so that one forward and
backward pass trains several steps of several samples, whatever fragments they came from. The last
chunk may be smaller, in samples and in steps: rows carry the batch's denominator.

A group without advantage has no gradient unless there is a KL term: it need not be trained.

Between two groups others may use the network, with the same weights and without gradients: the
state that a pass needs is set before each group.

The sizes of its chunks are measured while it goes on, until the best is known.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shared.devices.chunks import Chunk, Measurement, make_tuner
from shared.diffusion.device import device_bytes, fits
from shared.diffusion.models import Conditions, ModelAdapter, taken
from shared.diffusion.policy import LoadedPolicy
from shared.diffusion.ranks import local_shard
from shared.diffusion.training.objective import Behaviour, evaluate
from shared.diffusion.training.rows import MergesRows, Rows, TrainingGroup
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
        )

    def begin(self) -> None:
        for parameter in trained_parameters(self.model.transformer).values():
            parameter.grad = None
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

    def accumulate(self, group: TrainingGroup, chunk: Chunk) -> None:
        """Adds the gradient of one group, or a part of one, a chunk at a time.

        Raises:
            Untrainable: if the network cannot take its tensors.
        """
        network = self.model.transformer
        network.eval()  # as it samples: a replay equals its sample
        self._enable_adapter(True)
        device = next(each.device for each in network.parameters() if each.requires_grad)
        if isinstance(group, MergesRows):
            self.tally.note_states(group.num_states)
        for rows in group.rows(chunk, device):
            with torch.enable_grad():
                self._accumulate_rows(rows, group.staleness + self.num_steps)

    def _accumulate_rows(self, rows: Rows, staleness: int) -> None:
        behaviour = Behaviour(staleness == 0, self.largest_weight)
        with taken(Untrainable):
            found = evaluate(self.algorithm, rows, self, behaviour)
        per_row = found.surrogate.per_row
        rest = found.rest(self.algorithm.kl_beta)
        if rest is not None:
            per_row = per_row + rest
        if found.divergence is not None:
            self.tally.kl += float(found.divergence.detach().sum())
        loss = per_row.sum() / self.num_rows
        if loss.requires_grad:  # not where all rows are of a network that is not trained
            loss.backward()
        self.tally.loss += float(loss.detach())
        self.tally.record(
            found.surrogate,
            rows.advantage,
            clip_range=self.algorithm.clip_range,
            staleness=staleness,
        )

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
    tally: Tally

    @classmethod
    def of(cls, transaction: GradientTransaction, parameters: Mapping[str, Tensor]) -> Self:
        gradients = {
            name: None if parameter.grad is None else parameter.grad.detach().to("cpu", copy=True)
            for name, parameter in parameters.items()
        }
        return cls(transaction, parameters, gradients, replace(transaction.tally))

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
        self._tuner = make_tuner(recipe, device_bytes(loaded.device), self._num_samples)
        self._is_shared = recipe.trainer.sharded
        """Whether several ranks take every pass together, in chunks that the first one says."""

    @property
    def chunk(self) -> Chunk:
        """Chunk in which the next group is trained."""
        return self._tuner.chunk

    def accumulate(self, group: TrainingGroup) -> MemoryShortage | None:
        """Adds the gradient of a group, or of a part of one; returns what did not fit at first.

        While sizes are tried, one that does not fit is a measurement: the gradient is as it was
        before, and the group is trained in smaller chunks.

        Raises:
            OutOfMemory: if the smallest size does not fit, or one that has fitted before, or the
                one that the recipe fixes. The batch then has to be begun again, for a part of the
                gradient may be added already; the next chunks are smaller, if there are any.
        """
        shortage, again = None, TRIES_OF_SMALLEST
        while True:
            before = self._before_trial()
            try:
                self._try(group)
                return shortage
            except OutOfMemory as error:
                again -= not error.smaller
                if before is None or not again:
                    raise
                shortage = MemoryShortage.of(error, f"passes of {words_of(self.chunk)}")
            before.restore()

    def _before_trial(self) -> "GradientBefore | None":
        """Keeps the gradient while a size is tried, unless other ranks take the same passes."""
        if self._tuner.settled or self._is_shared:
            return None
        return GradientBefore.of(self.transaction, self._loaded.trained.parameters)

    def _try(self, group: TrainingGroup) -> None:
        chunk = self.chunk
        try:
            with fits(self._loaded.device, f"training {words_of(chunk)} in one pass", REMEDY):
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
        found = measured(train, chunk, network, device)
        rows = self.transaction.num_network_rows - before
        self._tuner = self._tuner.observe(replace(found, network_rows=max(1, rows)))


def measured(
    train: Callable[[], None], chunk: Chunk, network: nn.Module, device: torch.device
) -> Measurement:
    """Trains a group in chunks of this size, and measures time and memory.

    On CUDA, memory is the allocator's peak, weights included. A process on a CPU does not know its
    peak as well: there, memory is what the first forward pass keeps for its backward pass, which is
    the part that grows with rows, without the weights.
    """
    if device.type == "cuda":
        return _measured_on_cuda(train, chunk, device)
    saved = SavedForBackward(network)
    began = time.monotonic()
    with saved_tensors_hooks(saved.pack, saved.unpack):
        train()
    seconds = time.monotonic() - began
    return Measurement(chunk=chunk, seconds=seconds, peak_bytes=saved.num_bytes)


def _measured_on_cuda(train: Callable[[], None], chunk: Chunk, device: torch.device) -> Measurement:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    resident = torch.cuda.memory_allocated(device)
    began = time.monotonic()
    train()
    torch.cuda.synchronize(device)
    return Measurement(
        chunk=chunk,
        seconds=time.monotonic() - began,
        peak_bytes=torch.cuda.max_memory_allocated(device),
        resident_bytes=resident,
    )


class SavedForBackward:
    """Counts the bytes that autograd keeps between the first forward pass and its backward pass.

    A storage counts once, however many views of it are kept; the network's own do not count.
    """

    def __init__(self, network: nn.Module) -> None:
        tensors = map(local_shard, (*network.parameters(), *network.buffers()))
        self._resident = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._kept: dict[int, int] = {}
        self._counting = True

    @property
    def num_bytes(self) -> int:
        return sum(self._kept.values())

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts a tensor of any shape, and returns it without its graph."""
        storage = tensor.untyped_storage()
        if self._counting and storage.data_ptr() not in self._resident:
            self._kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # kept itself, an output would keep its graph alive

    def unpack(self, tensor: Tensor) -> Tensor:
        """Ends the count: the backward pass has begun."""
        self._counting = False
        return tensor
