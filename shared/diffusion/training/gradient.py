"""One batch's gradient as a transaction: begin, accumulate groups in any order, then step or abort.

TSP: samples and denoising steps are flattened into rows, sample by sample, so that one forward and
backward pass trains several steps of several samples. Fragment boundaries are gone before rows are
cut. The last chunk may be smaller, in samples and in steps: rows carry the batch's denominator.

A group without advantage has no gradient, where there is no KL term: it need not be trained.

Between two groups others may use the network, under the same weights and without gradients: what
a pass needs of its state is set before each group.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shared.diffusion.memory import is_out_of_memory
from shared.diffusion.models import Conditions, ModelAdapter
from shared.diffusion.training.group import Rows, TrainingGroup
from shared.diffusion.training.objective import evaluate
from shared.diffusion.training.tally import Tally
from shared.diffusion.weights import trained_parameters
from shared.errors import Untrainable
from shared.models.chunks import Chunk
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
        for rows in group.cut(chunk, device):
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
