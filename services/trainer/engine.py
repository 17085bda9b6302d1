"""The training half of a trainer: the adapter, its optimizer, and one batch's gradient."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim import AdamW

from services.trainer.checkpoint import checkpoint_tensors, restore_checkpoint
from services.trainer.chunks import Chunk, make_tuner
from services.trainer.gradient import GradientTransaction
from services.trainer.group import read_group
from services.trainer.measure import device_bytes, measured
from shared.diffusion.lora import adapter_parameters, adapter_tensors, load_adapter
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.tensors import pack, unpack
from shared.recipe import Recipe, Trainer


@dataclass(frozen=True, slots=True)
class Weights:
    digest: str
    adapter: bytes
    checkpoint: bytes


def learning_rate(table: Trainer, batch: int) -> float:
    """Of the optimizer step that batch ``batch`` makes; a function of the batch number alone."""
    if table.decay_steps is None:
        return table.learning_rate
    progress = min(1.0, batch / table.decay_steps)
    return table.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


class TrainerEngine:
    """Not thread-safe: one call at a time, as a device allows.

    Between two calls a generator may use the same network, under the same weights.
    """

    def __init__(self, recipe: Recipe, loaded: LoadedPolicy | None = None) -> None:
        """Trains ``loaded``, of which it needs the transformer, or a network of its own."""
        torch.set_num_threads(recipe.trainer.threads)
        self._recipe = recipe
        self._loaded = loaded or load_policy(recipe, {"transformer"})
        transformer = self._loaded.model.transformer
        self._parameters = adapter_parameters(transformer)
        self._in_use = self._loaded.in_use
        table = recipe.trainer
        self._optimizer = AdamW(
            self._parameters.values(),
            lr=table.learning_rate,
            betas=table.betas,
            weight_decay=table.weight_decay,
        )
        batch = recipe.batch
        self._transaction = GradientTransaction(
            model=self._loaded.model,
            algorithm=recipe.algorithm,
            num_rows=batch.groups * batch.group_size * recipe.sampling.window,
            guidance=recipe.model.guidance,
        )
        self._tuner = make_tuner(recipe, device_bytes(self._loaded.device))

    @property
    def device(self) -> str:
        return str(self._loaded.device)

    @property
    def chunk(self) -> Chunk:
        """In which the next group is trained."""
        return self._tuner.chunk

    def weights_digest(self) -> str:
        return self._in_use.digest()

    def weights(self) -> Weights:
        """The adapter and the optimizer as they stand."""
        return Weights(
            digest=self._in_use.digest(),
            adapter=pack(adapter_tensors(self._loaded.model.transformer)),
            checkpoint=pack(checkpoint_tensors(self._optimizer, self._parameters)),
        )

    def restore(self, adapter: bytes, checkpoint: bytes) -> None:
        load_adapter(self._loaded.model.transformer, unpack(adapter))
        restore_checkpoint(self._optimizer, self._parameters, unpack(checkpoint))

    def begin(self) -> None:
        """Start a batch: no gradient is left of any other."""
        self._transaction.begin()

    def accumulate(
        self,
        trajectories: Sequence[bytes],
        conditions: bytes,
        advantages: Sequence[float],
        staleness: int = 0,
    ) -> None:
        """Add the gradient of one group, given its fragments in order.

        Raises:
            ContractError: if the fragments do not make up a group of this run.
        """
        group = read_group(self._recipe.sampling, trajectories, conditions, advantages, staleness)
        chunk = self.chunk
        train = partial(self._transaction.accumulate, group, chunk)
        if self._tuner.settled:
            train()
            return
        network = self._loaded.model.transformer
        self._tuner = self._tuner.observe(measured(train, chunk, network, self._loaded.device))

    def gradient(self) -> dict[str, Tensor]:
        """A copy of what the groups of this batch have added up to so far."""
        return {
            name: parameter.grad.detach().clone()
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }

    def step(self, batch: int) -> dict[str, float]:
        """Take the optimizer step of the batch and return its metrics.

        A gradient that is not finite takes no step; the weights stay as they were.
        """
        table = self._recipe.trainer
        rate = learning_rate(table, batch)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), table.max_grad_norm))
        finite = math.isfinite(norm)
        if finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {
            **self._transaction.tally.metrics(),
            "grad_norm": norm if finite else 0.0,
            "learning_rate": rate,
            "skipped_not_finite": float(not finite),
            "micro_batch": float(self.chunk.samples),
            "tsp_steps": float(self.chunk.steps),
        }
