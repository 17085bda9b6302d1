"""Generates on a rollout worker's device."""

from dataclasses import dataclass

import torch

from shared.diffusion.generation import Generator, LocalGenerator
from shared.diffusion.policy import load_policy
from shared.diffusion.weights.trained_weights import StagedTensors
from shared.recipe.recipe import Recipe
from shared.run.manifest import StoredTensors


@dataclass(frozen=True, slots=True)
class StagedWeights:
    generator: Generator
    adapter: StagedTensors

    @property
    def digest(self) -> str:
        return self.adapter.digest

    async def adopt(self) -> None:
        self.generator.adopt(self.adapter)  # exchanges pointers: a thread would take longer


class RolloutEngine(LocalGenerator):
    """A `RolloutDevice` that generates with the recipe's model."""

    def __init__(self, recipe: Recipe) -> None:
        torch.set_num_threads(recipe.rollout.threads)
        loaded = load_policy(recipe, set(recipe.generating_parts), holding=recipe.holding)
        super().__init__(Generator(recipe, loaded, runs_ahead=True))

    async def stage(self, weights: StoredTensors) -> StagedWeights:
        return StagedWeights(self._generator, await self._generator.fetch(weights))
