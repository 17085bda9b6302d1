"""Independent devices on real services: rollout devices that train, several trainers, colocated."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.recipe.recipe import load_recipe, override
from tests.e2e.local_run import SMALL, LocalRun, StartRun
from tests.e2e.test_schedule import child
from tests.paths import DIGITS

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(900)]

TRAINER_STARVED = SMALL | {
    "batch.groups": 10,
    "batch.group_size": 8,
    "sampling.steps": 5,
    "sampling.window": 3,
    "sampling.first_window_starts": (0, 1),
    "schedule.fragment_size": 8,
    "schedule.max_staleness": 1,
    "schedule.tag": "off",
    "rollout.workers": 2,
    "rollout.can_train": True,
}
"""Training takes most of the time, so that rollout devices have gradients to compute."""


@pytest.fixture
def recipe_with(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(changes: dict[str, Any]) -> Path:
        path = tmp_path / f"recipe-{len(list(tmp_path.iterdir()))}.json"
        path.write_text(override(load_recipe(DIGITS), changes).model_dump_json())
        return path

    return write


def commits(run: LocalRun) -> list[dict[str, Any]]:
    """The commit records, from the scheduler's API while it answers."""
    return [
        run.get(f"/v1/batches/{batch['batch']}")
        for batch in run.get("/v1/batches")
        if batch["status"] == "committed"
    ]


def test_rollout_devices_train_for_a_trainer_that_is_behind_and_one_may_be_killed(
    start_run: StartRun, recipe_with: Callable[[dict[str, Any]], Path]
) -> None:
    run = start_run("--steps", "14", recipe=recipe_with(TRAINER_STARVED))
    run.wait_for(lambda view: view["step"] >= 4)
    child(run, "rollout-1").kill()  # whatever it is at; it is started again
    run.wait_for(lambda view: view["step"] >= 9)
    helped: Counter[str] = Counter()
    for batch in commits(run):
        assert [group["group"] for group in batch["groups"]] == list(range(10))
        assert batch["metrics"]["onpolicy_ratio_error"] <= 1e-4
        helped.update(g["trained_by"] for g in batch["groups"] if g["trained_by"])
    assert sum(helped.values()) >= 3
    assert all(address.startswith("rollout-") for address in helped)
    summary = run.finish()
    assert sum(summary["schedule"]["staleness"].values()) == 14 * 10 * 8


def test_one_device_generates_and_trains_by_turns(
    start_run: StartRun, recipe_with: Callable[[dict[str, Any]], Path]
) -> None:
    run = start_run("--steps", "2", "--mode", "colocated", recipe=recipe_with(SMALL))
    summary = run.finish()
    assert summary["schedule"]["staleness"] == {"0": 2 * 3 * 4}
    assert not (run.folder / "logs" / "rollout-0.log").exists()


def test_two_colocated_devices_train_equal_shares(
    start_run: StartRun, recipe_with: Callable[[dict[str, Any]], Path]
) -> None:
    changes = SMALL | {
        "batch.groups": 4, "schedule.mode": "colocated", "rollout.workers": 1,
        "rollout.can_train": True,
    }  # fmt: skip
    run = start_run("--steps", "9", recipe=recipe_with(changes))
    run.wait_for(lambda view: view["step"] >= 4)
    shares = [
        sum(group["trained_by"] is not None for group in batch["groups"]) for batch in commits(run)
    ]
    assert shares[0] == 2  # newest first; the first batch may begin before both are there
    run.finish()


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
