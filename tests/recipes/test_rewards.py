"""The rewards that recipes name can be had: `digenrl fetch` makes them, a judge's model is named,
and all others are in the repository or need no weights."""

from pathlib import Path

import pytest

from services.reward.kinds import KINDS
from shared.recipe.recipe import load_recipe
from tests.paths import RECIPES

PATHS = [path for path in sorted(RECIPES.rglob("*.toml")) if path.parent.name != "base"]
FOLDERS: dict[str, Path] = {}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_recipe_names_rewards_that_can_be_had(path: Path) -> None:
    recipe = load_recipe(path)
    for table in (*recipe.reward.scorers, *recipe.evaluation.scorers):
        kind = KINDS[table.type]
        if kind.extra == "reward-models":
            source = "video-align" if table.type.startswith("video-align") else table.type
            assert kind.hub is not None and table.folder is not None
            assert FOLDERS.setdefault(source, table.folder) == table.folder, "it is made once"
        elif kind.needs == "judge":
            assert table.judge is not None and "/" in table.judge.model
        elif kind.needs is not None:
            here = table.folder or table.source
            assert here is not None and here.exists(), f"{table.type} needs what is not here"
