"""Which samples have previews follows from the recipe, and is bounded by it."""

import pytest

from shared.recipe.recipe import load_recipe, override
from shared.run.previews import PREVIEW_BYTES, PreviewRule, evenly, shares
from tests.paths import ROOT


@pytest.mark.parametrize("megabytes", [0.0, 0.5, 1.0, 32.0])
@pytest.mark.parametrize("groups", [2, 8, 64])
@pytest.mark.parametrize("steps", [1, 2, 30, 1000])
def test_previews_stay_within_their_room(megabytes: float, groups: int, steps: int) -> None:
    recipe = load_recipe(ROOT / "recipes" / "digits.toml")
    changes = {"run.preview_mb": megabytes, "batch.groups": groups, "run.steps": steps}
    rule = PreviewRule.of(override(recipe, changes))
    number = len(rule.batches) * rule.groups * recipe.batch.group_size
    assert number * PREVIEW_BYTES <= megabytes * 1e6
    shown = {batch for batch in range(steps) if rule.has(batch, 0)}
    assert shown == rule.batches
    if megabytes:
        assert 0 in shown and (len(shown) == 1 or steps - 1 in shown)
        assert not rule.has(0, rule.groups)


def test_steps_are_evenly_apart_and_of_large_ones_the_first_groups_are_shown() -> None:
    assert sorted(evenly(4, 10)) == [0, 3, 6, 9] and evenly(1, 10) == {0} and not evenly(0, 10)
    assert shares(4000, 100, 16, 8) == (31, 16)
    assert shares(4000, 100, 64, 24) == (8, 20)
    assert shares(4000, 20, 4, 4) == (20, 4)
    assert shares(3, 20, 4, 4) == (0, 0)
