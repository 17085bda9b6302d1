"""The `Training` on real devices: one network each, and the optimizer on the first.

Between the beginning of a batch and its optimizer step the devices have nothing to do with one
another: each adds up the gradient of the samples that it trains. The step sums the devices'
gradients, and copies the adapter to all of them.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.trainer.engine.engine import TrainerEngine
from services.trainer.engine.threads import TrainingOnThreads
from shared.devices.protocols import GroupData, WeightsBlob
from shared.devices.slices import GroupSlice, slice_size
from shared.diffusion.models import Part
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.training.group import TrainingGroup
from shared.errors import UserError
from shared.recipe.recipe import Recipe

CACHED_GROUPS = 2
"""Groups are trained one after the other: at most two at the same time, one just begun."""


class ReplicatedTraining(TrainingOnThreads):
    def __init__(self, recipe: Recipe, loaded: Sequence[LoadedPolicy]) -> None:
        """``loaded``: the same policy on each device."""
        num_samples = slice_size(recipe.batch.group_size, len(loaded))
        engines = [TrainerEngine(recipe, each, num_samples=num_samples) for each in loaded]
        super().__init__(recipe, engines[0])
        self._others = engines[1:]
        self._groups = ParsedGroups(self._first.read, CACHED_GROUPS if self._others else 0)
        self.devices = tuple(Replica(engine, self._groups) for engine in engines)

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


@dataclass(frozen=True, slots=True)
class Replica:
    """`shared.devices.protocols.TrainingDevice`."""

    engine: TrainerEngine
    groups: "ParsedGroups"

    async def accumulate(self, group: GroupData, group_slice: GroupSlice) -> None:
        read = await self.groups.read(group)
        await asyncio.to_thread(self.engine.train, read.sliced(group_slice))


class ParsedGroups:
    """Groups that several devices train, each read from its bytes once."""

    def __init__(self, read: Callable[[GroupData], TrainingGroup], size: int) -> None:
        self._read = read
        self._recent: deque[tuple[GroupData, asyncio.Task[TrainingGroup]]] = deque(maxlen=size)

    async def read(self, group: GroupData) -> TrainingGroup:
        """Raises ContractError if the fragments do not make up a group of this run."""
        for known, reading in self._recent:
            if known is group:  # comparing the bytes would take as long as reading them
                return await reading
        reading = asyncio.create_task(asyncio.to_thread(self._read, group))
        self._recent.append((group, reading))
        return await reading

    def forget(self) -> None:
        self._recent.clear()


def load_replicas(recipe: Recipe, parts: set[Part]) -> list[LoadedPolicy]:
    """The policy on each of the trainer's devices.

    Raises:
        UserError: if this host has fewer GPUs than the recipe says.
    """
    count, wanted = torch.cuda.device_count(), recipe.trainer.devices
    if 0 < count < wanted:
        raise UserError(f"trainer.devices: {wanted}, but this host has {count}")
    return [load_policy(recipe, parts, index) for index in range(wanted)]
