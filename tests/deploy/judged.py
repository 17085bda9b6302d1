"""Whether a run that has ended has trained all of its groups, each once."""

import asyncio
from pathlib import Path

from digenrl.local.runs import find_run
from digenrl.local.store import run_store
from shared.process.settings import ServiceSettings
from shared.recipe.recipe import Recipe
from shared.run.commits import commit_chain
from shared.store import open_store
from tests.storm.judge import Rules, judge


def faults_of_run(folder: Path, *, is_finished: bool = True) -> list[str]:
    """What is wrong with the commits of the run in a folder; of a finished run, a missing step."""
    recipe = Recipe.model_validate_json((folder / "recipe.json").read_text())
    run = find_run(str(folder), folder.parent)
    with run_store(run):
        store = open_store(ServiceSettings(run=run.id).store)
        records = asyncio.run(commit_chain(store, run.id))
    missing = is_finished * (recipe.run.steps + 1 - len(records))
    return judge(records, Rules.of(recipe)) + [f"{missing} versions are missing"] * bool(missing)
