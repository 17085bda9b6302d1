"""Keeps several devices of this process busy in threads: one network each, and the optimizer on the
first.

Between the beginning of a batch and its optimizer step they have nothing to do with one another:
each adds up the gradient of the samples that it trains. The step sums the devices' gradients, and
copies the adapter to all of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import torch

from services.trainer.engine.engine_device import CACHED_GROUPS, EngineDevice, ParsedGroups
from services.trainer.engine.snapshot import EngineCopy, HeldWeights
from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.protocols import Snapshot
from shared.devices.slices import slice_size
from shared.diffusion.models import Part
from shared.diffusion.policy import LoadedPolicy, copy_policy, load_policy
from shared.errors import UserError
from shared.recipe.recipe import Recipe
from shared.run.manifest import StoredTensors


class ReplicatedTraining:
    def __init__(self, recipe: Recipe, loaded: Sequence[LoadedPolicy]) -> None:
        """``loaded``: the same policy on each device."""
        num_samples = slice_size(recipe.trained_samples, len(loaded))
        engines = [TrainerEngine(recipe, each, num_samples=num_samples) for each in loaded]
        self._first, self._others = engines[0], engines[1:]
        self._groups = ParsedGroups(self._first.read, CACHED_GROUPS if self._others else 0)
        self.devices = tuple(EngineDevice(engine, self._groups) for engine in engines)
        self._held: Sequence[tuple[TrainerEngine, HeldWeights]] = ()
        """Weights of the engines since they were changed last."""

    def weights_digest(self) -> str:
        return self._first.weights_digest()

    def sampling_digest(self) -> str:
        return self._first.sampling_digest()

    def begin(self) -> None:
        for engine in (self._first, *self._others):
            engine.begin()
        self._groups.forget()

    def skip(self, num_samples: int) -> None:
        self._first.skip(num_samples)

    async def restore(self, weights: StoredTensors, checkpoint: StoredTensors) -> None:
        await self._first.restore(weights, checkpoint)
        await asyncio.to_thread(self._copy_weights)

    async def replace(self, weights: StoredTensors, sampling: StoredTensors | None) -> None:
        await self._first.replace(weights, sampling)
        await asyncio.to_thread(self._copy_weights)

    async def step(self, batch: int, scale: float = 1.0) -> dict[str, float]:
        return await asyncio.to_thread(self._step, batch, scale)

    async def copy(self, *, states: bool, kept: bool = True) -> Callable[[], Awaitable[Snapshot]]:
        """``kept``: whether it overwrites what the call before has copied."""
        copied = await asyncio.to_thread(self._first.copy, states=states, kept=kept)
        return partial(self._taken, copied)

    async def weights(self) -> Snapshot:
        """Copy everything as it stands to memory of its own."""
        return await (await self.copy(states=True, kept=False))()

    async def _taken(self, copied: EngineCopy) -> Snapshot:
        """Take the digest of a copy, and tell it to the engines that have held the same since."""
        snapshot = await asyncio.to_thread(copied.snapshot)
        for engine, held in self._held:
            engine.know(held, snapshot)
        return snapshot

    def _step(self, batch: int, scale: float) -> dict[str, float]:
        for engine in self._others:
            self._first.add(engine.gradient(), engine.tally)
            engine.begin()
        self._first.check_rows()
        metrics = self._first.step(batch, scale)
        for engine in self._others:
            engine.num_steps = self._first.num_steps
        self._copy_weights()
        return metrics

    def _copy_weights(self) -> None:
        """Also looks at what has arrived: only the first device's weights are digested."""
        for engine in self._others:
            engine.copy_weights(self._first)
            engine.check_same(self._first)
        self._held = [(engine, engine.held) for engine in (self._first, *self._others)]


def load_replicas(recipe: Recipe, parts: set[Part]) -> list[LoadedPolicy]:
    """Load the policy on the first of the trainer's devices, and copy it to the others.

    Raises:
        UserError: if this host has fewer GPUs than the recipe says.
        OutOfMemory: if it does not fit.
    """
    count, wanted = torch.cuda.device_count(), recipe.trainer.devices
    if 0 < count < wanted:
        raise UserError(f"trainer.devices: {wanted}, but this host has {count}")
    first = load_policy(recipe, parts, trains=True)
    return [first, *(copy_policy(first, index) for index in range(1, wanted))]
