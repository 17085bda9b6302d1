"""The recipes of published settings, held against the values of their sources (`published/*.json`).

A file there has every key that its source decides: the source's name of the setting, its value in
terms of the key, or in words where the key cannot say it, and the file and commit that it was read
in. `absent` are keys for which the source has nothing, `others` settings that no key stands for;
null, if those of a file that this one is based on do not apply.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from digenrl.local.checking.check import check
from shared.learning.algorithms import ALGORITHMS
from shared.recipe.files import merged, read_layers
from shared.recipe.recipe import Recipe, load_recipe
from tests.paths import RECIPES, ROOT

FOLDER = RECIPES / "published"
SOURCES = Path(__file__).parent / "published"
NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))
OURS = {
    "run.name", "run.steps", "model.folder", "algorithm.name", "trainer.devices",
    "trainer.shard_devices", "trainer.gradient_checkpointing", "rollout.workers", "reward.workers",
    "schedule.mode", "encoder.workers", "encoder.threads", "encoder.device",
    "evaluation.steps", "evaluation.prompts", "evaluation.samples_per_prompt",
}  # fmt: skip
"""Keys for names, hardware and measurements: a recipe may set them without a source."""


@cache
def source(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SOURCES / f"{name}.json").read_text())
    below: dict[str, Any] = source(found["base"]) if "base" in found else {}
    for part in ("keys", "others"):
        found[part] = below.get(part, {}) | found[part]
    found["absent"] = {*below.get("absent", ()), *found["absent"]} - found["keys"].keys()
    return found


def value_of(recipe: Recipe, key: str) -> Any:
    value: Any = json.loads(recipe.model_dump_json())
    for part in key.split("."):
        value = value[part]
    if key == "reward.scorers":
        return {each["type"]: each["weight"] for each in value}
    return value


def differences(recipe: Recipe, name: str) -> set[str]:
    said = source(name)
    wanted = {key: each["value"] for key, each in said["keys"].items()}
    wanted |= dict.fromkeys(said["absent"])
    return {key for key, value in wanted.items() if value_of(recipe, key) != value} | {
        name for name, value in said["others"].items() if value is not None
    }


def header(name: str) -> str:
    lines = (FOLDER / f"{name}.toml").read_text().split("\n\n")[0].split("\n")
    assert all(line.startswith("# ") for line in lines)
    return " ".join(line[2:] for line in lines)


def set_keys(tables: dict[str, Any], above: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in tables.items():
        deeper = isinstance(value, dict)
        found |= set_keys(value, f"{above}{name}.") if deeper else {f"{above}{name}"}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_published_recipe_differs_from_its_source_as_its_header_says(name: str) -> None:
    text = header(name)
    assert "Differs from the source in: " in text and " Source" in text
    named = set(re.findall(r"`([\w.]+)`", text.split("Differs from the source in: ")[1]))
    assert differences(load_recipe(FOLDER / f"{name}.toml"), name) == named
    assert source(name)["repository"] in text


@pytest.mark.parametrize("name", NAMES)
def test_a_published_recipe_sets_no_key_without_a_source(name: str) -> None:
    said = source(name)
    keys = set_keys(merged(read_layers(FOLDER / f"{name}.toml")))
    assert keys - OURS <= said["keys"].keys() | said["absent"] | {"algorithm.best_of"}


@pytest.mark.parametrize("name", NAMES)
def test_a_key_is_followed_by_the_setting_that_it_stands_for(name: str) -> None:
    """It does where it says what the source says; the file that sets a key names the setting."""
    own = json.loads((SOURCES / f"{name}.json").read_text())
    texts = [(FOLDER / f"{name}.toml").read_text()]
    while based := re.search(r'^base = "(.*)"$', texts[-1], re.MULTILINE):
        texts.append(next(iter([*FOLDER.rglob(Path(based[1]).name)])).read_text())
    for key in own["keys"].keys() - differences(load_recipe(FOLDER / f"{name}.toml"), name):
        setting, last = own["keys"][key]["setting"], key.rsplit(".", 1)[1]
        if not any(re.search(rf"^{last} = .*# {re.escape(setting)}", t, re.M) for t in texts):
            assert not any(re.search(rf"^{last} = ", text, re.M) for text in texts[:1]), key


@pytest.mark.parametrize("name", NAMES)
def test_a_published_recipe_can_run(name: str) -> None:
    assert check(FOLDER / f"{name}.toml", elsewhere=True).recipe.run.name.startswith(
        name.split(".")[0]
    )
    text = (FOLDER / f"{name}.toml").read_text()
    assert max(len(line) for line in text.split("\n")) <= 120


def test_every_published_algorithm_has_a_recipe_and_every_recipe_a_source() -> None:
    assert [path.stem for path in sorted(SOURCES.glob("*.json"))] == NAMES
    made = {load_recipe(FOLDER / f"{name}.toml").algorithm.name for name in NAMES}
    assert made >= ALGORITHMS.keys() - {"awm", "dpo"}
    for name in NAMES:
        path = Path(load_recipe(FOLDER / f"{name}.toml").data.prompts)
        assert path.is_file() and path.is_relative_to(ROOT)


@pytest.mark.parametrize("name", NAMES)
def test_a_published_recipe_is_for_fluid_devices(name: str) -> None:
    assert load_recipe(FOLDER / f"{name}.toml").schedule.mode == "fluid"
