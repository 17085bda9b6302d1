"""Every key of a recipe has a meaning, from one source: its docstring."""

import json
import runpy
import tomllib
from pathlib import Path

import jsonschema_rs
import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from shared.recipe.keys import recipe_keys
from shared.recipe.recipe import Recipe
from tests.paths import ROOT

SCHEMA = ROOT / "docs" / "recipe.schema.json"


def test_every_key_has_a_meaning() -> None:
    """118 keys of the site's reference were names that ended in colons."""
    fields = {key.name: key.field for key in recipe_keys(Recipe).values() if key.field is not None}
    assert len(fields) > 150
    assert [name for name, field in fields.items() if len(field.description or "") < 12] == []


def test_the_committed_reference_and_schema_are_those_of_the_code(tmp_path: Path) -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "site" / "hooks.py"))
    renew = "run `python docs/site/hooks.py`"
    assert (ROOT / "docs" / "recipe-keys.md").read_text() == hooks["recipe"](), renew
    assert SCHEMA.read_text() == hooks["schema"](), renew


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes").rglob("*.toml")), ids=lambda path: path.stem
)
def test_every_shipped_recipe_is_valid_for_an_editor(path: Path) -> None:
    recipe = json.loads(json.dumps(tomllib.loads(path.read_text())))
    jsonschema_rs.validate(json.loads(SCHEMA.read_text()), recipe)


def test_an_editor_shows_a_typing_error_and_a_meaning() -> None:
    schema = json.loads(SCHEMA.read_text())
    with pytest.raises(jsonschema_rs.ValidationError, match="learning_rte"):
        jsonschema_rs.validate(schema, {"trainer": {"learning_rte": 1e-4}})
    trainer = schema["$defs"]["Trainer"]["properties"]
    assert trainer["learning_rate"]["description"] == "Learning rate of AdamW."


def test_the_command_explains_one_key_or_all_with_a_word() -> None:
    one = CliRunner().invoke(app, ["recipe", "keys", "batch.group_size"]).output.splitlines()
    assert [" ".join(line.split()) for line in one] == [
        "--batch.group_size required", "Number of samples per prompt.",
    ]  # fmt: skip
    several = CliRunner().invoke(app, ["recipe", "keys", "keep_"]).output
    assert [word for word in several.split() if word.startswith("--run")] == [
        "--run.keep_last", "--run.keep_every", "--run.keep_best",
    ]  # fmt: skip
