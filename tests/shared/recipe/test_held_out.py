"""Evaluations measure the user's own prompts: what replaces the prompts of training takes the
recipe's held-out ones away, and a tenth of the new ones is held out."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from digenrl.local.checking.check import check
from shared.errors import UserError
from shared.learning.prompts import read_prompts
from shared.recipe.files import read_layers
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.recipe.sources import sourced_values
from shared.run.run_recipe import evaluation_rows, held_out_rows, prompt_order
from shared.store import open_store
from shared.store.settings import StoreSettings
from tests.paths import DIGITS, RECIPES
from tests.stored_recipe import store_recipe

SHIPPED = sorted({*RECIPES.glob("*.toml"), *RECIPES.glob("published/*.toml")})


def own(folder: Path, number: int) -> Path:
    path = folder / "mine.txt"
    path.write_text("".join(f"my prompt {each}\n" for each in range(number)))
    return path


def trained(recipe: Recipe) -> list[str]:
    """Return the texts that the first epoch trains."""
    order = prompt_order(recipe)
    number = len(order.prompts)
    return [order.of_group(0, group, number).text for group in range(number)]


def evaluated(recipe: Recipe) -> list[str]:
    return [prompt.text for prompt, _ in evaluation_rows(recipe)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.prompts", "{prompts}"),
        ("data.dataset.folder", "{prompts}"),
        ("data.dataset", {"folder": "{prompts}"}),
        ("data.dataset.id", "org/name"),
    ],
)
@pytest.mark.parametrize("name", ["flux1-dev", "qwen-image.12gb", "published/flow-grpo.sd35-ocr"])
def test_an_option_that_replaces_the_prompts_clears_those_of_the_evaluation(
    tmp_path: Path, name: str, key: str, value: object
) -> None:
    path, prompts = RECIPES / f"{name}.toml", own(tmp_path, 4)
    assert load_recipe(path).evaluation.prompts is not None
    given = json.loads(json.dumps(value).replace("{prompts}", str(prompts)))
    recipe = load_recipe(path, {key: given})
    assert (recipe.evaluation.prompts, recipe.evaluation.dataset) == (None, None)
    said = {each.key: each.kind for each in sourced_values(recipe, read_layers(path), {key: given})}
    assert said["evaluation.prompts"] == "default"
    typed = load_recipe(path, {key: given, "evaluation.prompts": str(prompts)})
    assert typed.evaluation.prompts == prompts


def test_a_file_that_replaces_the_prompts_of_its_base_clears_those_of_the_evaluation(
    tmp_path: Path,
) -> None:
    path = tmp_path / "recipe.toml"
    table = f'base = "{RECIPES / "flux1-dev.toml"}"\n[data]\nprompts = "{own(tmp_path, 30)}"'
    path.write_text(table)
    assert load_recipe(path).evaluation.prompts is None
    path.write_text(f'{table}\n[evaluation]\nprompts = "mine.txt"')
    assert load_recipe(path).evaluation.prompts == tmp_path / "mine.txt"
    path.write_text(f'base = "{RECIPES / "flux1-dev.toml"}"\n[data]\nbackground = "black"')
    assert load_recipe(path).evaluation.prompts is not None


@pytest.mark.parametrize(
    ("number", "held"), [(4, 0), (19, 0), (20, 2), (39, 3), (320, 32), (1000, 32)]
)
def test_a_tenth_of_twenty_prompts_or_more_is_evaluated_and_never_trained(
    tmp_path: Path, number: int, held: int
) -> None:
    recipe = load_recipe(RECIPES / "digits.toml", {"data.prompts": str(own(tmp_path, number))})
    everything = {f"my prompt {each}" for each in range(number)}
    shown = set(evaluated(recipe))
    if held:
        assert len(shown) == held
        assert set(trained(recipe)) == everything - shown
        assert len(held_out_rows(recipe)) == held
    else:
        assert shown == set(trained(recipe)) == everything
        assert not held_out_rows(recipe)


def test_the_choice_depends_on_the_prompts_alone(tmp_path: Path) -> None:
    """Neither on the seed nor on the order of the file; and of equal prompts none is trained if one
    is held out."""
    lines = [f"my prompt {each % 40}" for each in range(100)]
    held = []
    for seed in range(3):
        path = tmp_path / f"{seed}.txt"
        random.Random(seed).shuffle(lines)
        path.write_text("\n".join(lines))
        recipe = load_recipe(DIGITS, {"data.prompts": str(path), "run.seed": seed})
        held.append(Counter(evaluated(recipe)))
        assert not held[-1].keys() & set(trained(recipe))
        assert sum(held[-1].values()) + len(trained(recipe)) == 100
    assert held[0] == held[1] == held[2]
    assert len(held[0]) == 4


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_train_the_prompts_that_they_trained(path: Path) -> None:
    recipe = load_recipe(path)
    assert prompt_order(recipe).prompts == read_prompts(recipe.data.prompts)
    shown = recipe.evaluation.prompts or recipe.data.prompts
    assert evaluated(recipe) == [prompt.text for prompt in read_prompts(shown)]


async def test_a_resumed_run_trains_what_it_began_with(tmp_path: Path) -> None:
    path = own(tmp_path, 30)
    store = open_store(StoreSettings(url=f"file://{tmp_path / 'store'}"))
    recipe = load_recipe(DIGITS, {"data.prompts": str(path)})
    begun = await store_recipe(store, recipe)
    other = override(recipe, {"evaluation.prompts": str(own(tmp_path, 30))})
    resumed = await store_recipe(store, other)
    assert trained(resumed) == trained(begun)
    assert len(evaluated(resumed)) == 30
    assert len(evaluated(await store_recipe(store, recipe))) == 3
    with pytest.raises(UserError, match=r"held_out: .* was started with 3, not 5"):
        await store_recipe(store, override(recipe, {"evaluation.held_out": 5}))


def test_check_says_which_prompts_are_evaluated(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    rows = [{"prompt": f"digit {each}", "digit": each % 10} for each in range(30)]
    path.write_text("\n".join(map(json.dumps, rows)))
    for held_out, said in ((None, "3 held-out prompts"), (0, "the prompts of training")):
        options = {"data.prompts": str(path), "evaluation.held_out": held_out}
        assert (
            f"evaluations measure {said}" in check(RECIPES / "digits.toml", options=options).lines
        )
    with pytest.raises(UserError, match="30 of 30 different prompts leave none to train"):
        check(RECIPES / "digits.toml", options={**options, "evaluation.held_out": 30})
