"""Every shipped recipe fits the cards that it says, by traces: one of each model at each shape of
its samples, and the recipes of that shape by arithmetic on it."""

from pathlib import Path

import pytest

from digenrl.planning.forecast import forecast
from digenrl.planning.runnable import HOST_GPUS
from digenrl.trace.memory import MEMORY_SHARE
from digenrl.trace.record import Trace
from digenrl.trace.runs import trace, trace_setting
from services.scheduler.sim.steady import steady_fragment_size
from shared.models.published import find_configuration
from shared.recipe.recipe import Recipe, load_recipe, with_folder
from tests.local.test_check import SHIPPED, stated_devices
from tests.paths import RECIPES

Key = tuple[object, ...]


def recipe_of(name: str) -> Recipe:
    recipe = load_recipe(RECIPES / f"{name}.toml")
    return with_folder(recipe, find_configuration(recipe.model.folder).folder)


def folder_of(name: str) -> str:
    return load_recipe(RECIPES / f"{name}.toml").model.folder.name


def key_of(recipe: Recipe) -> Key:
    """Recipes with the same key share a trace."""
    return (
        recipe.model.model_dump_json(),
        recipe.trainer.gradient_checkpointing,
        recipe.trainer.ema,
        recipe.algorithm.name,
        recipe.algorithm.kl_beta > 0,
        recipe.trainer.shard_devices,
    )


@pytest.mark.night
@pytest.mark.parametrize("model", sorted({folder_of(name) for name in SHIPPED}))
def test_recipes_fit_the_cards_that_they_are_for(model: str) -> None:
    traces: dict[Key, Trace] = {}
    for name in [name for name in SHIPPED if folder_of(name) == model]:
        recipe = recipe_of(name)
        key = key_of(recipe)
        if key not in traces:
            setting = trace_setting(recipe, steady_fragment_size(recipe))
            traces[key] = trace(recipe, setting, is_published=True, say=lambda _: None)
        found = forecast(
            recipe, stated_devices(name), None,
            host_gpus=HOST_GPUS, timing=False, trace=traces[key],
        )  # fmt: skip
        assert found.needs
        for need in found.needs:
            for kind in need.pool:
                has = found.profile.devices[kind].memory_gib
                assert need.needed.total <= MEMORY_SHARE * has, (name, need)


def test_every_recipe_has_a_published_configuration() -> None:
    for name in SHIPPED:
        assert Path(find_configuration(recipe_of(name).model.folder).folder / "vae").is_dir()
