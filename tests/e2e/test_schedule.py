"""TAG on real services."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.local_run import SMALL, LocalRun, StartRun, recipe_of, wait_until

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(900)]


LONG_ROLLOUT = SMALL | {
    "batch.groups": 6,
    "batch.group_size": 8,
    "sampling.steps": 60,
    "sampling.window": 1,
    "schedule.fragment_size": 4,
    "schedule.tsp_steps": 1,
}
"""Generation takes most of the time, so that the trainer waits and its device can be lent."""


def logged(run: LocalRun, worker: str, event: str) -> list[dict[str, Any]]:
    lines = (run.folder / "logs" / f"{worker}.log").read_text().splitlines()
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    return [entry for entry in entries if entry.get("event") == event]


def child(run: LocalRun, word: str) -> psutil.Process:
    [found] = [
        process
        for process in psutil.Process(run.process.pid).children()
        if word in process.cmdline()
    ]
    return found


def test_help_by_the_trainer_changes_no_byte_and_ends_by_itself_if_the_scheduler_vanishes(
    start_run: StartRun, tmp_path: Path
) -> None:
    options = ("--steps", "4", "--deterministic", "--rollout.workers", "1")
    recipe = recipe_of(tmp_path, LONG_ROLLOUT)
    alone = start_run(*options, "--tag", "off", name="alone", recipe=recipe).finish()
    assert alone["schedule"]["samples_helped"] == 0

    run = start_run(*options, "--tag", "4", name="helped", recipe=recipe)
    run.wait_for(lambda view: view["phase"] == "running")
    wait_until(lambda: run.get("/v1/tag")["lent"], 60)
    scheduler = child(run, "scheduler")
    scheduler.suspend()
    try:
        wait_until(lambda: bool(logged(run, "trainer-0", "loan_expired")), 40)
    finally:
        scheduler.resume()
    helped = run.finish()
    assert helped["adapter_sha256"] == alone["adapter_sha256"]
    assert helped["schedule"]["samples_helped"] > 0
    assert set(helped["schedule"]["staleness"]) == {"0"}
