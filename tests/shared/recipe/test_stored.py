"""A run that is resumed: what may change, and whose recipe is read."""

import json
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.recipe.recipe import load_recipe, override, stored_recipe
from shared.run.run_recipe import check_same_run
from tests.paths import DIGITS
from tests.shared.recipe.recipes import with_algorithm


def test_a_resumed_run_may_take_more_steps_but_not_another_seed() -> None:
    recipe = load_recipe(DIGITS)
    check_same_run(recipe, override(recipe, {"run.steps": 77, "rollout.workers": 5}))
    with pytest.raises(UserError, match=r"run\.seed.*resume with that value"):
        check_same_run(recipe, override(recipe, {"run.seed": 99}))


def test_a_recipe_that_another_release_has_stored_is_refused(tmp_path: Path) -> None:
    """A run is finished by the release that began it: with a default for a key that is missing, it
    would go on otherwise than it began."""
    recipe = load_recipe(with_algorithm(tmp_path, 'name = "mix-grpo"'))
    assert stored_recipe(recipe.model_dump_json().encode()) == recipe
    plain = recipe.model_dump(mode="json")
    del plain["trainer"]["ema_warmup"]
    with pytest.raises(ValueError, match="another release has stored this recipe"):
        stored_recipe(json.dumps(plain).encode())
    plain["trainer"]["order"] = "index"
    with pytest.raises(ValueError, match="order"):
        stored_recipe(json.dumps(plain).encode())


def test_a_resumed_run_may_be_evaluated_in_another_way() -> None:
    recipe = load_recipe(DIGITS)
    changes = {"every": 2, "steps": 30, "sigmas": "shifted", "height": 4, "width": 4, "threads": 2}
    others = {f"evaluation.{key}": value for key, value in changes.items()}
    check_same_run(recipe, override(recipe, others))
