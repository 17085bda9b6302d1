"""Several members in mode `colocated`, on real services."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.recipe.recipe import load_recipe, override
from tests.e2e.local_run import SMALL, StartRun
from tests.paths import DIGITS

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def recipe_with(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(changes: dict[str, Any]) -> Path:
        path = tmp_path / f"recipe-{len(list(tmp_path.iterdir()))}.json"
        path.write_text(override(load_recipe(DIGITS), changes).model_dump_json())
        return path

    return write


def test_one_device_generates_and_trains_by_turns(
    start_run: StartRun, recipe_with: Callable[[dict[str, Any]], Path]
) -> None:
    run = start_run("--steps", "2", "--mode", "colocated", recipe=recipe_with(SMALL))
    summary = run.finish()
    assert summary["schedule"]["staleness"] == {"0": 2 * 3 * 4}
    assert not (run.folder / "logs" / "rollout-0.log").exists()


def test_a_trainer_of_two_devices_generates_its_share_and_trains(
    start_run: StartRun, recipe_with: Callable[[dict[str, Any]], Path]
) -> None:
    changes = SMALL | {
        "batch.groups": 6, "trainer.devices": 2, "schedule.tag": 4, "rollout.workers": 1
    }  # fmt: skip
    run = start_run("--steps", "3", recipe=recipe_with(changes))
    summary = run.finish()
    helped = [decision["samples_helped"] for decision in summary["schedule"]["tag"]]
    assert sum(helped) > 0, json.dumps(summary["schedule"])
