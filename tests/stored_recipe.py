"""The recipe of a run, stored as `digenrl up` does."""

from pathlib import Path

from shared.recipe.recipe import Recipe
from shared.run.run_recipe import check_recipe
from shared.store import ObjectStore


async def store_recipe(
    store: ObjectStore, recipe: Recipe, recipe_folder: Path | None = None
) -> Recipe:
    """Check a recipe, store it with its run, and return it; raises UserError as the check does."""
    return await (await check_recipe(store, recipe, recipe_folder)).put(store)
