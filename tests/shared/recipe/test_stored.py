"""A run that is resumed: recipes of earlier releases, and what may change."""

import json
import re
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.recipe.recipe import Recipe, load_recipe, override, stored_recipe
from shared.run.run_recipe import check_same_run
from tests.paths import DIGITS
from tests.shared.recipe.recipes import fault, with_algorithm


def test_a_resumed_run_may_take_more_steps_but_not_another_seed() -> None:
    recipe = load_recipe(DIGITS)
    check_same_run(recipe, override(recipe, {"run.steps": 77, "rollout.workers": 5}))
    with pytest.raises(UserError, match=r"run\.seed.*resume with that value"):
        check_same_run(recipe, override(recipe, {"run.seed": 99}))


def test_a_stored_run_keeps_what_it_had(tmp_path: Path) -> None:
    """It is stored in the words of releases that had fewer keys, and one that did nothing."""
    recipe = load_recipe(with_algorithm(tmp_path, 'name = "mix-grpo"'))
    plain = recipe.model_dump(mode="json")
    plain["algorithm"] |= {"nft_beta": 1.0, "clip_range": 1e-4}
    plain["sampling"] |= {"window_stride": None, "noise_level": 0.9}
    plain["trainer"]["ema"] = 0.99
    del plain["sampling"]["roll_back"], plain["trainer"]["ema_warmup"]
    found = stored_recipe(json.dumps(plain).encode())
    windows = found.sampling.moving_window
    assert (windows.stride, windows.rolls_back) == (recipe.sampling.window, False)
    assert (found.sampling.noise_level, found.trainer.ema_warmup) == (0.9, False)
    assert stored_recipe(found.model_dump_json().encode()) == found
    check_same_run(found, Recipe.model_validate(found.model_dump()))


def test_a_stored_run_has_the_old_policy_that_it_began_with(tmp_path: Path) -> None:
    recipe = load_recipe(with_algorithm(tmp_path, 'name = "diffusion-nft"\nnft_beta = 0.1'))
    assert stored_recipe(recipe.model_dump_json().encode()) == recipe
    plain = recipe.model_dump(mode="json")
    del plain["algorithm"]["nft_decay"]  # there was none, and nft_beta did nothing
    table = stored_recipe(json.dumps(plain).encode()).algorithm
    assert (table.nft_decay, table.nft_beta) == (0, 1.0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('[trainer]\norder = "index"', 'trainer.order: "index" is renamed to deterministic = true'),
        ('[trainer]\norder = "arrival"', "is renamed to deterministic = false"),
        ('[schedule]\nmode = "naive"', 'schedule.mode: "naive" is renamed to mode = "sequential"'),
    ],
)
def test_a_key_or_value_of_an_earlier_release_is_refused_with_its_new_name(
    tmp_path: Path, line: str, said: str
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f'base = "{DIGITS}"\n{line}')
    assert said in fault(path)
    table, key, value = re.split(r"\W+", line.strip('["'))
    with pytest.raises(UserError, match="is renamed to"):
        override(load_recipe(DIGITS), {f"{table}.{key}": value})


@pytest.mark.parametrize(("order", "deterministic"), [("index", True), ("arrival", False)])
def test_a_stored_run_is_read_by_the_names_that_it_had(order: str, deterministic: bool) -> None:
    recipe = load_recipe(DIGITS)
    plain = recipe.model_dump(mode="json")
    del plain["trainer"]["deterministic"]
    plain["trainer"]["order"] = order
    plain["schedule"]["mode"] = "naive"
    found = stored_recipe(json.dumps(plain).encode())
    changes = {"trainer.deterministic": deterministic, "schedule.mode": "sequential"}
    assert found == override(recipe, changes)


@pytest.mark.parametrize(("sharded", "hosts"), [(True, 1), (False, 4)])
def test_a_stored_run_of_ranks_has_as_many_devices(sharded: bool, hosts: int) -> None:
    plain = load_recipe(DIGITS).model_dump(mode="json")
    del plain["trainer"]["hosts"]
    plain["trainer"] |= {"ranks": 4, "sharded": sharded}
    trainer = stored_recipe(json.dumps(plain).encode()).trainer
    assert (trainer.ranks, trainer.devices, trainer.hosts) == (4, 4, hosts)
    plain["trainer"] |= {"ranks": 1, "devices": 3, "sharded": False}
    trainer = stored_recipe(json.dumps(plain).encode()).trainer
    assert (trainer.ranks, trainer.devices, trainer.hosts) == (1, 3, 1)


def test_a_resumed_run_may_be_evaluated_in_another_way() -> None:
    recipe = load_recipe(DIGITS)
    changes = {"every": 2, "steps": 30, "sigmas": "shifted", "height": 4, "width": 4, "threads": 2}
    others = {f"evaluation.{key}": value for key, value in changes.items()}
    check_same_run(recipe, override(recipe, others))
