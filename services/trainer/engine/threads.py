"""What every `Training` on real devices does alike: it keeps them busy in threads."""

import asyncio
from abc import ABC, abstractmethod

from services.trainer.engine.additions import Additions
from services.trainer.engine.engine import TrainerEngine
from shared.devices.protocols import GradientPart, Weights
from shared.recipe.recipe import Recipe


class TrainingOnThreads(ABC):
    def __init__(self, recipe: Recipe, first: TrainerEngine) -> None:
        """``first``: the engine of the device that has the optimizer state which is committed."""
        self._first = first
        self._additions = Additions(recipe, first)

    def begin(self) -> None:
        self._first.begin()
        self._additions.forget()

    def skip(self, num_samples: int) -> None:
        self._first.skip(num_samples)

    async def add(self, part: GradientPart) -> None:
        await self._additions.add(part)

    async def restore(self, adapter: bytes, checkpoint: bytes) -> None:
        await asyncio.to_thread(self._restore, adapter, checkpoint)

    async def step(self, batch: int, scale: float = 1.0) -> dict[str, float]:
        return await asyncio.to_thread(self._step, batch, scale)

    async def weights(self) -> Weights:
        return await asyncio.to_thread(self._weights)

    @abstractmethod
    def _restore(self, adapter: bytes, checkpoint: bytes) -> None: ...

    @abstractmethod
    def _step(self, batch: int, scale: float) -> dict[str, float]: ...

    @abstractmethod
    def _weights(self) -> Weights: ...
