"""Trains on several devices of this process: one network each, and the optimizer on the first.

Between the beginning of a batch and its optimizer step the devices have nothing to do with one
another: each adds up the gradient of the samples that it trains. The step sums the devices'
gradients, and copies the adapter to all of them.
"""

from collections.abc import Sequence

import torch

from services.trainer.engine.threads import TrainingOnThreads
from services.trainer.engine.trainer_engine import (
    CACHED_GROUPS,
    EngineDevice,
    ParsedGroups,
    TrainerEngine,
)
from shared.devices.protocols import WeightsBlob
from shared.devices.slices import slice_size
from shared.diffusion.models import Part
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.errors import UserError
from shared.recipe.recipe import Recipe


class ReplicatedTraining(TrainingOnThreads):
    def __init__(self, recipe: Recipe, loaded: Sequence[LoadedPolicy]) -> None:
        """``loaded``: the same policy on each device."""
        num_samples = slice_size(recipe.batch.group_size, len(loaded))
        engines = [TrainerEngine(recipe, each, num_samples=num_samples) for each in loaded]
        super().__init__(recipe, engines[0])
        self._others = engines[1:]
        self._groups = ParsedGroups(self._first.read, CACHED_GROUPS if self._others else 0)
        self.devices = tuple(EngineDevice(engine, self._groups) for engine in engines)

    def weights_digest(self) -> str:
        return self._first.weights_digest()

    def begin(self) -> None:
        super().begin()
        for engine in self._others:
            engine.begin()
        self._groups.forget()

    def _restore(self, adapter: bytes, checkpoint: bytes) -> None:
        self._first.restore(adapter, checkpoint)
        self._copy_weights()

    def _weights(self) -> WeightsBlob:
        return self._first.weights()

    def _step(self, batch: int, scale: float) -> dict[str, float]:
        for engine in self._others:
            self._first.add(engine.gradient(), engine.tally)
            engine.begin()
        self._remote.into(self._first)
        self._first.check_on_policy()
        metrics = self._first.step(batch, scale)
        for engine in self._others:
            engine.num_steps = self._first.num_steps
        self._copy_weights()
        return metrics

    def _copy_weights(self) -> None:
        for engine in self._others:
            engine.copy_weights(self._first)


def load_replicas(recipe: Recipe, parts: set[Part]) -> list[LoadedPolicy]:
    """Load the policy on each of the trainer's devices.

    Raises:
        UserError: if this host has fewer GPUs than the recipe says.
    """
    count, wanted = torch.cuda.device_count(), recipe.trainer.devices
    if 0 < count < wanted:
        raise UserError(f"trainer.devices: {wanted}, but this host has {count}")
    return [load_policy(recipe, parts, index) for index in range(wanted)]
