"""Gradients that were computed elsewhere, added up on the CPU until the optimizer step."""

import asyncio

from torch import Tensor

from services.trainer.engine.engine import TrainerEngine
from shared.devices.protocols import GradientPart
from shared.diffusion.training.tally import Tally
from shared.errors import ContractError
from shared.recipe.recipe import Recipe


class Additions:
    def __init__(self, recipe: Recipe, engine: TrainerEngine) -> None:
        self._num_rows = recipe.batch.group_size * recipe.sampling.window
        """Of a group."""
        self._engine = engine
        self._total: dict[str, Tensor] = {}
        self._tally = Tally()
        self._adding = asyncio.Lock()

    def forget(self) -> None:
        self._total, self._tally = {}, Tally()

    async def add(self, part: GradientPart) -> None:
        """Keeps no device: may be called beside everything but `into`.

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
        engine.add(self._total, self._tally.plain())


def _add(total: dict[str, Tensor], gradient: dict[str, Tensor]) -> None:
    for name, tensor in gradient.items():
        total[name] += tensor
