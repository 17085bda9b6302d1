"""Keeps real devices busy in threads: what every `Training` on them does alike."""

import asyncio
from abc import ABC, abstractmethod

from torch import Tensor

from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.protocols import GroupGradient, WeightsBlob
from shared.diffusion.training.tally import Tally
from shared.errors import ContractError
from shared.recipe.recipe import Recipe


class RemoteGradientSum:
    """Adds up gradients of groups that were computed elsewhere, until the optimizer step."""

    def __init__(self, recipe: Recipe, engine: TrainerEngine) -> None:
        self._num_rows = recipe.batch.group_size * recipe.sampling.window
        """Number of rows of a group."""
        self._engine = engine
        self._total: dict[str, Tensor] = {}
        self._tally = Tally()
        self._adding = asyncio.Lock()

    def forget(self) -> None:
        self._total, self._tally = {}, Tally()

    async def add(self, part: GroupGradient) -> None:
        """Add a gradient. Holds no device: may be called beside everything but `into`.

        Raises:
            ContractError: if it is not a group's gradient at the weights in use.
        """
        if part.tally.get("num_rows") != self._num_rows:
            raise ContractError(f"a gradient of {part.tally.get('num_rows')} rows is of no group")
        gradient = await asyncio.to_thread(self._engine.read_gradient, part)
        async with self._adding:
            self._tally.merge(part.tally)
            if self._total:
                await asyncio.to_thread(_add, self._total, gradient)
            else:
                self._total = gradient

    def into(self, engine: TrainerEngine) -> None:
        engine.add(self._total, self._tally.as_dict())


def _add(total: dict[str, Tensor], gradient: dict[str, Tensor]) -> None:
    for name, tensor in gradient.items():
        total[name] += tensor


class TrainingOnThreads(ABC):
    def __init__(self, recipe: Recipe, first: TrainerEngine) -> None:
        """``first``: the engine of the device whose optimizer state is committed."""
        self._first = first
        self._remote = RemoteGradientSum(recipe, first)

    def begin(self) -> None:
        self._first.begin()
        self._remote.forget()

    def skip(self, num_samples: int) -> None:
        self._first.skip(num_samples)

    async def add(self, part: GroupGradient) -> None:
        await self._remote.add(part)

    async def restore(self, adapter: bytes, checkpoint: bytes) -> None:
        await asyncio.to_thread(self._restore, adapter, checkpoint)

    async def step(self, batch: int, scale: float = 1.0) -> dict[str, float]:
        return await asyncio.to_thread(self._step, batch, scale)

    async def weights(self) -> WeightsBlob:
        return await asyncio.to_thread(self._weights)

    @abstractmethod
    def _restore(self, adapter: bytes, checkpoint: bytes) -> None: ...

    @abstractmethod
    def _step(self, batch: int, scale: float) -> dict[str, float]: ...

    @abstractmethod
    def _weights(self) -> WeightsBlob: ...
