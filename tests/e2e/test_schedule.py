"""How the devices are kept busy, on real services: one step of staleness, TAG, unequal workers."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from digenrl.local.keys import keys_of
from shared.recipe.recipe import load_recipe, override
from tests.e2e.local_run import SMALL, LocalRun, StartRun, wait_until
from tests.paths import DIGITS

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
LEASE_S = 6.0
"""A worker is missed after 5 s of silence, looked for twice a second."""

LONG_ROLLOUT = SMALL | {
    "batch.groups": 6,
    "batch.group_size": 8,
    "sampling.steps": 60,
    "sampling.window": 1,
    "schedule.fragment_size": 4,
    "schedule.tsp_steps": 1,
}
"""Generation takes most of the time, so that the trainer waits and its device can be lent."""


@pytest.fixture
def recipe_with(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(changes: dict[str, Any]) -> Path:
        path = tmp_path / f"recipe-{len(list(tmp_path.iterdir()))}.json"
        path.write_text(override(load_recipe(DIGITS), changes).model_dump_json())
        return path

    return write


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


def test_with_one_step_of_staleness_samples_are_at_most_one_version_old(
    start_run: StartRun, recipe_with: Callable[[dict[str, Any]], Path]
) -> None:
    changes = SMALL | {"schedule.max_staleness": 1, "schedule.fragment_size": "auto"}
    run = start_run("--steps", "12", recipe=recipe_with(changes))
    run.wait_for(lambda view: view["step"] >= 2)
    # A trainer that is there before the rollout workers helps at once; with them it warms up.
    wait_until(lambda: "warm-up" in {one["reason"] for one in run.get("/v1/tag")["decisions"]}, 60)
    assert run.post("/v1/tag", {"mode": "fixed", "groups": 1}).status_code == 202
    wait_until(lambda: run.get("/v1/tag")["mode"] == "fixed", 30)
    schedule = run.finish()["schedule"]
    assert set(schedule["staleness"]) == {"0", "1"}
    assert sum(schedule["staleness"].values()) == 12 * 3 * 4
    assert {decision["reason"] for decision in schedule["tag"]} >= {"warm-up", "fixed"}
    pauses = sorted(
        entry["pause_ms"]
        for worker in ("rollout-0", "rollout-1")
        for entry in logged(run, worker, "policy_adopted")
    )
    assert len(pauses) >= 10
    assert pauses[int(0.99 * len(pauses))] <= 20


def test_help_by_the_trainer_changes_no_byte_and_ends_by_itself_if_the_scheduler_vanishes(
    start_run: StartRun, recipe_with: Callable[[dict[str, Any]], Path]
) -> None:
    options = ("--steps", "4", "--deterministic", "--rollout-workers", "1")
    recipe = recipe_with(LONG_ROLLOUT)
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


def test_unequal_workers_join_and_leave_and_the_fast_one_takes_the_last_fragments(
    start_run: StartRun, recipe_with: Callable[[dict[str, Any]], Path]
) -> None:
    changes = LONG_ROLLOUT | {
        "batch.groups": 10, "batch.group_size": 24, "sampling.steps": 40,
        "schedule.fragment_size": "auto", "trainer.micro_batch": 24,
    }  # fmt: skip
    run = start_run(
        "--steps", "12", "--rollout-workers", "1", "--tag", "off", recipe=recipe_with(changes)
    )
    run.wait_for(lambda view: view["step"] >= 1)
    slow = start_worker(run, "slow", "-m", "bench.slowed", "3")
    small = start_worker(run, "small", memory_gib=0.001)
    try:
        wait_until(lambda: worker(run, "slow") is not None, 120)
        assert wait_until(lambda: worker(run, "slow")["num_in_hand"] > 0, 10) <= 5  # type: ignore[index]
        wait_until(lambda: bool(worker(run, "slow")["seconds_per_sample"]), 120)  # type: ignore[index]
        run.wait_for(lambda view: view["step"] >= 5)
        seconds = {
            view["worker"]: view["seconds_per_sample"]
            for view in run.get("/v1/workers")
            if view["service"] == "rollout"
        }
        assert seconds["slow"] > 1.5 * seconds["rollout-0"]
        tiny = worker(run, "small")
        assert tiny is not None and tiny["refused"].startswith("the model needs 0.0")
        assert tiny["num_in_hand"] == 0
        before = run.get("/v1/run")
        wait_until(lambda: run.get("/v1/run")["step"] > before["step"], 60)
        slow.kill()
        killed_at, step = time.monotonic(), run.get("/v1/run")["step"]
        wait_until(lambda: run.get("/v1/run")["step"] > step, 120)
        alone = 240 * seconds["rollout-0"]
        assert time.monotonic() - killed_at <= LEASE_S + 1.5 * alone
    finally:
        for process in (slow, small):
            process.kill()
            process.wait()
    summary = run.finish()
    assert summary["samples_trained"] == 12 * 240


def worker(run: LocalRun, name: str) -> dict[str, Any] | None:
    views: list[dict[str, Any]] = run.get("/v1/workers")
    return next((view for view in views if view["worker"] == name), None)


SERVE_ROLLOUT = ("-m", "digenrl", "serve", "rollout")


def start_worker(
    run: LocalRun, name: str, *program: str, **settings: float
) -> "subprocess.Popen[bytes]":
    """Starts one more rollout worker for the run, as on another host."""
    given = {f"DIGENRL_{key.upper()}": str(value) for key, value in settings.items()}
    where = {"PYTHONPATH": str(ROOT)}
    keys = keys_of(run.folder).environment("rollout")  # a forked process does not show its own
    command = [sys.executable, *(program or SERVE_ROLLOUT), "--run", run.folder.name]
    return subprocess.Popen(
        [*command, "--worker", name, "--port", str(run.free_port())],
        env=child(run, "rollout-0").environ() | keys | given | where,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
