"""One batch's gradient as a transaction: begin, accumulate groups in any order, then step or abort.

TSP: samples and denoising steps are flattened into rows, sample by sample, so that one forward and
backward pass trains several steps of several samples. Fragment boundaries are gone before rows are
cut. The last chunk may be smaller, in samples and in steps: rows carry the batch's denominator.

A group without advantage has no gradient, where there is no KL term: it need not be trained.

Between two groups others may use the network, under the same weights and without gradients: what
a pass needs of its state is set before each group.

The sizes of its chunks are measured while it goes on, until the best is known.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shared.devices.chunks import Chunk, Measurement, make_tuner
from shared.diffusion.models import Conditions, ModelAdapter
from shared.diffusion.out_of_memory import device_bytes, fits, is_out_of_memory
from shared.diffusion.policy import LoadedPolicy
from shared.diffusion.training.objective import evaluate
from shared.diffusion.training.rows import Rows, TrainingGroup
from shared.diffusion.training.tally import Tally
from shared.diffusion.weights import local_shard, trained_parameters
from shared.errors import OutOfMemory, Untrainable
from shared.recipe.recipe import Recipe
from shared.recipe.sampling import Algorithm


@contextmanager
def taken() -> Iterator[None]:
    """Around a forward pass: tensors of shapes, types or names that the network does not take are
    their group's fault. What a GPU or another rank fails at is not."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
        said = str(error)
        if is_out_of_memory(error) or any(sign in said for sign in ("CUDA", "NCCL", "HIP")):
            raise
        reason = " ".join(f"{type(error).__name__}: {said}".split())[:300]
        raise Untrainable(f"the network cannot take these tensors: {reason}") from error


@dataclass(slots=True)
class GradientTransaction:
    """The gradient of one batch, summed in the adapter's ``grad`` fields."""

    model: ModelAdapter
    algorithm: Algorithm
    num_rows: int
    """Of an optimizer step: the one denominator of every row's loss."""
    guidance: float
    tally: Tally = field(default_factory=Tally)
    """Of the rows that were trained."""
    num_skipped: int = 0
    """Rows that were not, because their gradient is zero."""
    num_steps: int = 0
    """Optimizer steps that were taken since the batch began."""

    @classmethod
    def of(cls, recipe: Recipe, model: ModelAdapter) -> "GradientTransaction":
        batch = recipe.batch
        return cls(
            model=model,
            algorithm=recipe.algorithm,
            num_rows=batch.groups
            * batch.group_size
            * recipe.sampling.window
            // recipe.trainer.updates,
            guidance=recipe.model.guidance,
        )

    def begin(self) -> None:
        for parameter in trained_parameters(self.model.transformer).values():
            parameter.grad = None
        self.tally = Tally()
        self.num_skipped = 0
        self.num_steps = 0

    def skip(self, num_rows: int) -> None:
        """Leave out rows whose gradient is zero; may be called beside `accumulate`."""
        self.num_skipped += num_rows

    def metrics(self) -> dict[str, float]:
        """Of all rows, skipped ones included."""
        everything = replace(self.tally)
        everything.skip(self.num_skipped)
        return everything.metrics()

    def accumulate(self, group: TrainingGroup, chunk: Chunk) -> None:
        """Add the gradient of one group, or a part of one, a chunk at a time.

        Raises:
            Untrainable: if the network cannot take its tensors.
        """
        network = self.model.transformer
        network.eval()  # as it samples: a replay equals its sample
        self._enable_adapter(True)
        device = next(iter(trained_parameters(network).values())).device
        for rows in group.rows(chunk, device):
            with torch.enable_grad():
                self._accumulate_rows(rows, group.staleness + self.num_steps)

    def _accumulate_rows(self, rows: Rows, staleness: int) -> None:
        with taken():
            found = evaluate(self.algorithm, rows, self, on_policy=staleness == 0)
        per_row = found.surrogate.per_row
        if found.divergence is not None:
            per_row = per_row + self.algorithm.kl_beta * found.divergence
            self.tally.kl += float(found.divergence.detach().sum())
        loss = per_row.sum() / self.num_rows
        loss.backward()
        self.tally.loss += float(loss.detach())
        self.tally.record(
            found.surrogate,
            rows.advantage,
            clip_range=self.algorithm.clip_range,
            staleness=staleness,
        )

    def velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        sigma = sigma.to(latents.device)
        return self.model.velocity(latents, sigma, conditions, guidance=self.guidance)

    @torch.no_grad()
    def reference_velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """Of the base model: the same network without its adapter."""
        self._enable_adapter(False)
        try:
            return self.velocity(latents, sigma, conditions)
        finally:
            self._enable_adapter(True)

    def _enable_adapter(self, enabled: bool) -> None:
        """With it, its parameters require gradients; without it, they do not."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        for module in self.model.transformer.modules():
            if isinstance(module, BaseTunerLayer):
                module.enable_adapters(enabled)


REMEDY = (
    "make trainer.micro_batch or schedule.tsp_steps smaller, set trainer.gradient_checkpointing, "
    "or give trainer.memory_gib what the trainer may take"
)


class AutoChunkedGradient:
    """On one device. What is learned there holds for the batches that follow."""

    def __init__(
        self, recipe: Recipe, loaded: LoadedPolicy, num_samples: int | None = None
    ) -> None:
        """``num_samples`` of a group are accumulated at a time; by default all of them."""
        self.transaction = GradientTransaction.of(recipe, loaded.model)
        self._loaded = loaded
        self._num_samples = num_samples or recipe.batch.group_size
        self._num_steps = recipe.sampling.window
        self._tuner = make_tuner(recipe, device_bytes(loaded.device), self._num_samples)

    @property
    def chunk(self) -> Chunk:
        """In which the next group is trained."""
        return self._tuner.chunk

    def accumulate(self, group: TrainingGroup) -> None:
        """Add the gradient of a group, or of a part of one.

        Raises:
            OutOfMemory: if it does not fit; then the batch has to be begun again, of which a part
                may be added up. Smaller chunks are next, if there are any.
        """
        chunk = self.chunk
        what = f"training {chunk.samples} samples x {chunk.steps} steps in one pass"
        try:
            with fits(self._loaded.device, what, REMEDY):
                self._accumulate(group, chunk)
        except OutOfMemory as error:
            before, self._tuner = self._tuner, self._tuner.without(chunk)
            raise OutOfMemory(str(error), smaller=self._tuner is not before) from None

    def _accumulate(self, group: TrainingGroup, chunk: Chunk) -> None:
        train = partial(self.transaction.accumulate, group, chunk)
        usual = group.shape == (self._num_samples, self._num_steps)
        if self._tuner.settled or not usual:
            train()
            return
        network, device = self._loaded.model.transformer, self._loaded.device
        self._tuner = self._tuner.observe(measured(train, chunk, network, device))


def measured(
    train: Callable[[], None], chunk: Chunk, network: nn.Module, device: torch.device
) -> Measurement:
    """Train a group in chunks of this size, and say what it took.

    On CUDA memory is what the allocator gave out at most, the weights included. A process on a CPU
    cannot tell its peak so closely: there it is the tensors that the first forward pass keeps for
    its backward, which is the part that grows with rows; the weights are left out.
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
    """Counts what autograd keeps between the first forward pass and its backward pass.

    Storages count once, however many views of them are kept; the network's own do not count.
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
        storage = tensor.untyped_storage()
        if self._counting and storage.data_ptr() not in self._resident:
            self._kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # kept itself, an output would keep its graph alive

    def unpack(self, tensor: Tensor) -> Tensor:
        self._counting = False
        return tensor
