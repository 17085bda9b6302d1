"""The generating half of a rollout worker: the whole model in memory, and a generator over it."""

import torch

from shared.diffusion.generation import Generated, Generator
from shared.diffusion.policy import load_policy
from shared.recipe import Recipe

__all__ = ["Generated", "RolloutEngine"]


class RolloutEngine(Generator):
    """Not thread-safe: one fragment at a time, as a device allows."""

    def __init__(self, recipe: Recipe) -> None:
        torch.set_num_threads(recipe.rollout.threads)
        super().__init__(recipe, load_policy(recipe, {"transformer", "text", "decoder"}))
