"""Makes a run in a store without training: each version has an adapter of its own."""

from typing import Any

import torch

from digenrl.evaluation.sampler import Sampler
from shared.diffusion.sampling.tensors import pack
from shared.diffusion.weights.trained_weights import trained_tensors, weights_digest
from shared.messages.contracts import Policy
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.run.commits import commit, newest_commit
from shared.run.layout import weights_folder
from shared.store import ObjectStore
from tests import examples
from tests.paths import DIGITS
from tests.stored_recipe import store_recipe

SMALL = {"run.steps": 5, "evaluation.every": 2, "evaluation.samples_per_prompt": 2}
NUM_PROMPTS = 40


def recipe_with(changes: dict[str, Any]) -> Recipe:
    return override(load_recipe(DIGITS), SMALL | changes)


async def begin(store: ObjectStore, **changes: Any) -> Recipe:
    """Store the recipe of a run; keys have a double underscore for the dot."""
    named = {key.replace("__", "."): value for key, value in changes.items()}
    recipe = recipe_with(named)
    await store_recipe(store, recipe)
    return recipe


async def commit_up_to(store: ObjectStore, recipe: Recipe, last: int) -> None:
    """Commit the versions that are missing; weights depend on the version alone."""
    parent = await newest_commit(store, recipe.run.name)
    base = trained_tensors(Sampler(recipe).model.transformer)
    for version in range(0 if parent is None else parent.policy.version + 1, last + 1):
        generator = torch.Generator().manual_seed(version)
        tensors = {
            name: tensor + 0.1 * version * torch.randn(tensor.shape, generator=generator)
            for name, tensor in base.items()
        }
        weights = await store.put(
            weights_folder(recipe.run.name), pack(tensors), suffix=".safetensors"
        )
        policy = Policy(version=version, weights_digest=weights_digest(tensors))
        parent = examples.record(
            version, parent, run=recipe.run.name, policy=policy, weights=weights, checkpoint=weights
        )
        await commit(store, parent)
