"""Generates on a rollout worker's device, and computes gradients if asked."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shared.devices.protocols import GroupData, GroupGradient, Staged
from shared.diffusion.device import fits
from shared.diffusion.generation import Generator, LocalGenerator
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.weights import StagedTensors
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
    """A `RolloutDevice` whose generation and gradients use one network, by turns."""

    def __init__(self, recipe: Recipe) -> None:
        torch.set_num_threads(recipe.rollout.threads)
        loaded = load_policy(recipe, set(recipe.generating_parts), holding=recipe.holding)
        super().__init__(Generator(recipe, loaded, runs_ahead=True))
        self._beside = loaded.beside
        self._gradient = _gradient(recipe, loaded) if recipe.rollout.can_train else None

    async def stage(self, weights: StoredTensors) -> StagedWeights:
        return StagedWeights(self._generator, await self._generator.fetch(weights))

    async def gradient(self, group: GroupData, trained: Staged | None = None) -> GroupGradient:
        """Compute the gradient of one whole group, at the weights in use, or at the ``trained``
        ones if those in use only generate; only if the recipe lets this device train.

        Raises:
            ContractError: if the fragments do not make up a group of this run.
            OutOfMemory: if the device has not the memory.
        """
        assert self._gradient is not None
        remedy = "make trainer.micro_batch smaller or set rollout.can_train to false"
        with fits(self._generator.device, "the gradient of a group", remedy):
            return await asyncio.to_thread(self._computed, group, trained)

    def _computed(self, group: GroupData, trained: Staged | None) -> GroupGradient:
        assert self._gradient is not None
        if trained is None:
            return self._gradient(group)
        assert isinstance(trained, StagedWeights)  # by this device
        with self._beside.lying(trained.adapter.tensors):
            return self._gradient(group)


def _gradient(recipe: Recipe, loaded: LoadedPolicy) -> Callable[[GroupData], GroupGradient]:
    # Only workers that train pay for its import.
    from shared.diffusion.training.group_gradient import GroupGradients

    return GroupGradients(loaded, recipe).compute
