"""Which samples have previews follows from the recipe, and is bounded by it."""

import pytest

from shared.recipe.recipe import load_recipe, override
from shared.run.previews import (
    MAX_BATCH_AGE,
    PREVIEW_BYTES,
    PreviewRule,
    evenly,
    preview_bytes,
    shares,
)
from tests.paths import ROOT


@pytest.mark.parametrize("megabytes", [0.0, 0.5, 1.0, 32.0])
@pytest.mark.parametrize("groups", [2, 8, 640])
@pytest.mark.parametrize("steps", [1, 2, 30, 200])
def test_previews_stay_within_their_room(megabytes: float, groups: int, steps: int) -> None:
    recipe = load_recipe(ROOT / "recipes" / "digits.toml")
    changes = {"run.preview_mb": megabytes, "batch.groups": groups, "run.steps": steps}
    rule = PreviewRule.from_recipe(override(recipe, changes))
    for newest in range(steps):
        made = (batch for batch in range(newest + 1) if rule.has(batch, 0))
        kept = [batch for batch in made if rule.keeps(batch, newest - MAX_BATCH_AGE)]
        number = len(kept) * rule.groups * recipe.batch.group_size
        assert number * preview_bytes(recipe) <= megabytes * 1e6
        if megabytes:
            assert 0 in kept and (newest in kept or not rule.newest)
    assert not rule.has(0, rule.groups)


def test_pictures_of_the_newest_steps_stay_beside_those_of_steps_spread_over_the_run() -> None:
    recipe = load_recipe(ROOT / "recipes" / "digits.toml")
    short = PreviewRule.from_recipe(recipe)
    assert all(short.keeps(batch, recipe.run.steps) for batch in range(recipe.run.steps))
    long = PreviewRule.from_recipe(override(recipe, {"run.steps": 3000}))
    kept = [batch for batch in range(1001) if long.keeps(batch, 1000)]
    assert long.newest > 100 and kept[-long.newest :] == list(range(1001 - long.newest, 1001))
    assert 30 < len(set(kept) & long.batches) < 100
    assert preview_bytes(recipe) == 328
    assert preview_bytes(override(recipe, {"model.height": 512})) == PREVIEW_BYTES


def test_steps_are_evenly_apart_and_of_large_ones_the_first_groups_are_shown() -> None:
    assert sorted(evenly(4, 10)) == [0, 3, 6, 9] and evenly(1, 10) == {0} and not evenly(0, 10)
    assert shares(4000, 100, 16, 8) == (31, 16)
    assert shares(4000, 100, 64, 24) == (8, 20)
    assert shares(4000, 20, 4, 4) == (20, 4)
    assert shares(3, 20, 4, 4) == (0, 0)
