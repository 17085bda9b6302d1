"""Trains on one device: holds the trained weights, their optimizer and their gradient."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace

import structlog
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import AdamW

from services.trainer.engine.checkpoint import Restoration, checkpoint_tensors
from services.trainer.engine.snapshot import SnapshotBuffers
from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData, Snapshot
from shared.diffusion.loading.device import fits
from shared.diffusion.loading.ranks import local_shard
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.sampling.tensors import pack
from shared.diffusion.training.auto_chunks import REMEDY, AutoChunkedGradient, describe_chunk
from shared.diffusion.training.rows import TrainingGroup, read_group
from shared.diffusion.weights.master_weights import RoundedWeights
from shared.learning.algorithms import old_policy_decay
from shared.messages.records import Level
from shared.messages.workers import MemoryShortage
from shared.recipe.recipe import Recipe
from shared.recipe.trainer import Trainer
from shared.run.manifest import StoredTensors

log = structlog.get_logger()
STEP_REMEDY = "train fewer weights (model.lora.rank), or share them (trainer.shard_devices)"


def learning_rate(table: Trainer, batch: int) -> float:
    """Return the learning rate of a batch, which depends on its number alone."""
    if table.decay_steps is None:
        return table.learning_rate
    progress = min(1.0, batch / table.decay_steps)
    return table.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def average_decay(table: Trainer, step: int) -> float:
    """Return the decay of the moving average at optimizer step ``step`` of the run, from 0.

    With a warm-up it is min((1 + step) / (10 + step), `Trainer.ema`), as in Flow-GRPO: with a
    constant decay d the average still has d^n of the first weights after n steps, .74 for .99, 30.
    """
    decay = table.ema or 0.0
    return min((1 + step) / (10 + step), decay) if table.ema_warmup else decay


class TrainerEngine:
    """Adds up gradients and takes optimizer steps.

    Not thread-safe: one call at a time, as a device allows. Only `skip` may run concurrently with
    other methods. Between two calls a generator may use the same network, under the same weights.
    """

    def __init__(
        self, recipe: Recipe, loaded: LoadedPolicy | None = None, *, num_samples: int | None = None
    ) -> None:
        """Train the transformer of ``loaded``, or a network of its own; ``num_samples`` of a group
        at a time, by default all of them."""
        torch.set_num_threads(recipe.trainer.threads)
        self._recipe = recipe
        self._loaded = loaded or load_policy(recipe, {"transformer"}, trains=True)
        if recipe.exchange.down != "exact":
            trained = RoundedWeights(self._loaded.model.transformer)
            self._loaded = replace(self._loaded, trained=trained)
        self._trained = self._loaded.trained
        table = recipe.trainer
        self._optimizer = AdamW(
            self._parameters.values(),
            lr=table.learning_rate,
            betas=table.betas,
            weight_decay=table.weight_decay,
        )
        self._averages = self._copies() if table.ema is not None else {}
        self._sets = self._loaded.sets
        if recipe.keeps_old_policy:
            self._sets.keep_old()
        else:
            self._sets.forget_old()
        self._tuned = AutoChunkedGradient(recipe, self._loaded, num_samples)
        self._transaction = self._tuned.transaction

    @property
    def _parameters(self) -> Mapping[str, nn.Parameter]:
        """Parameters of the optimizer."""
        return self._trained.parameters

    @property
    def chunk(self) -> Chunk:
        """Size of the chunks that the next group is trained in."""
        return self._tuned.chunk

    def weights_digest(self) -> str:
        """Return the digest of the trained weights."""
        return self._loaded.in_use.digest()

    def sampling_digest(self) -> str:
        """Return the digest of the weights that generate."""
        with self._sets.sampling():
            return self._loaded.in_use.digest()

    def weights(self) -> Snapshot:
        """Copy the trained weights and the optimizer as they stand to memory of its own."""
        buffers, sampling = SnapshotBuffers(self._recipe.run.shard_bytes), None
        if self._sets.old_differs:
            sampling = self._sets.old, self.sampling_digest()
        trained = self._trained.held, self.weights_digest()
        snapshot = buffers.take(trained, sampling, self._states(), self._trained.types)
        return replace(snapshot, change=self._packed_change())

    def _packed_change(self) -> bytes | None:
        """Return the change that has made the newest version as an object, if it was rounded."""
        change = {name: each.cpu() for name, each in self._trained.change.items()}
        return pack(change) if change else None

    def _states(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint. Without memory, an old policy is the weights of its
        version."""
        old = self._sets.newest_old if self._recipe.algorithm.nft_decay else {}
        return checkpoint_tensors(self._optimizer, self._trained, self._averages, old)

    async def restore(self, weights: StoredTensors, checkpoint: StoredTensors) -> None:
        """Go back to a committed version. Reads of what is sharded only this rank's part.

        Raises:
            IntegrityError: if it is one of other weights, or an object is missing.
        """
        version = Restoration(self._optimizer, self._trained, self._averages, self._sets)
        async for part in weights.parts(version.wants_weights):
            await asyncio.to_thread(version.add_weights, part)
        async for part in checkpoint.parts(version.wants_states):
            await asyncio.to_thread(version.add_states, part)
        await asyncio.to_thread(version.finish)

    def _copies(self) -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in self._parameters.items()}

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the batch so far, wherever they were taken."""
        return self._transaction.num_steps

    def begin(self) -> None:
        """Start a batch: no gradient is left of any other."""
        self._transaction.begin()
        for parameter in self._parameters.values():
            parameter.grad = None

    def read(self, group: GroupData) -> TrainingGroup:
        """Unpack a whole group; touches no device.

        Raises:
            ContractError: if the fragments do not make up a group of this run.
        """
        return read_group(self._recipe, group)

    def train(self, group: TrainingGroup, chunk: Chunk | None = None) -> MemoryShortage | None:
        """Add the gradient of a group, or of a slice of one, in chunks of the best size found, or
        of this one; return the first memory shortage, if any. ``kind``: what its advantages are, if
        not what the scheduler sends.

        Raises:
            OutOfMemory: if the batch has to be begun again.
        """
        if chunk is None:
            return self._tuned.accumulate(group)
        with fits(self._loaded.device, f"training {describe_chunk(chunk)} in one pass", REMEDY):
            self._transaction.accumulate(group, chunk)
        return None

    def skip(self, num_samples: int) -> None:
        """Count samples of a group whose gradient is zero."""
        self._transaction.skip(num_samples * self._recipe.sampling.window)

    def gradient(self) -> dict[str, Tensor]:
        """Copy the gradient that the groups of this batch have added up to so far."""
        gradients = {name: each.grad for name, each in self._parameters.items()}
        return {name: each.detach().clone() for name, each in gradients.items() if each is not None}

    @property
    def tally(self) -> dict[str, float]:
        """Statistics of the rows that this device has trained."""
        return self._transaction.tally.as_dict()

    def check_rows(self) -> None:
        """Raise BatchFailed if these weights cannot be trained on the rows of this batch."""
        self._transaction.check()

    def step(
        self, batch: int, kept: float | None = None, level: Level | None = None
    ) -> dict[str, float]:
        """Take the optimizer step of the batch and return its metrics.

        ``kept`` multiplies the gradient: by default, it drops the rows without advantage since the
        last step. A gradient that is not finite takes no step; the weights stay as they were.
        ``level`` is the rounding of the change to a version: by default the recipe's.
        """
        kept = self._transaction.take_kept_factor() if kept is None else kept
        table = self._recipe.trainer
        rate = learning_rate(table, batch)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._fill_gradient(kept)
        norm = self._clipped()
        finite = math.isfinite(norm)
        self._transaction.keep_start(self._trained.held)
        is_version = self._transaction.num_steps + 1 >= table.updates
        with fits(self._loaded.device, "the optimizer step", STEP_REMEDY):
            if finite:
                self._optimizer.step()
            else:
                log.warning("step_not_taken", batch=batch, reason="the gradient is not finite")
            self._trained.put_in_use(level or self._recipe.exchange.down, is_version=is_version)
            if finite:
                self._average(batch * table.updates + self._transaction.num_steps)
        self._transaction.num_steps += 1
        self._move_old_policy(batch)
        self._optimizer.zero_grad(set_to_none=True)
        return {
            **self._transaction.metrics(),
            "grad_norm": norm if finite else 0.0,
            "learning_rate": rate,
            "skipped_not_finite": float(not finite),
            "micro_batch": float(self.chunk.samples),
            "tsp_steps": float(self.chunk.steps),
        }

    def _clipped(self) -> float:
        """Clip the gradient, and return the norm that it had."""
        gradients = [each.grad for each in self._parameters.values() if each.grad is not None]
        parts = [local_shard(each) for each in gradients]  # of a traced rank, its share
        norm = get_total_norm(parts)
        factor = torch.clamp(self._recipe.trainer.max_grad_norm / (norm + 1e-6), max=1.0)
        for part in parts:
            part.mul_(factor)
        return float(norm)

    @torch.no_grad()
    def _average(self, step: int) -> None:
        weight = 1 - average_decay(self._recipe.trainer, step)
        for name, average in self._averages.items():
            average.lerp_(self._parameters[name], weight)

    def _move_old_policy(self, batch: int) -> None:
        """Have the policy that samples stay where it is until the batch's last optimizer step, and
        then follow the trained one."""
        if (decay := self._old_decay(batch)) is not None:
            self._sets.follow(decay)
        else:
            self._sets.old_differs = self._recipe.keeps_old_policy

    def _old_decay(self, batch: int) -> float | None:
        """Return by what the old policy follows after this step, if it does."""
        updates, done = self._recipe.trainer.updates, self._transaction.num_steps
        if done < updates or not self._recipe.keeps_old_policy:
            return None
        return old_policy_decay(self._recipe.algorithm.nft_decay, batch * updates + done)

    @torch.no_grad()
    def _fill_gradient(self, kept: float) -> None:
        """Multiply the gradient; give the optimizer zeros where every group was skipped."""
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif kept != 1.0:
                parameter.grad.mul_(kept)
