"""What the HTTP API says of whom a run waits for, its workers and its pace."""

from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

from services.scheduler.core.inputs import WorkerJoined
from services.scheduler.core.machine import step
from services.scheduler.core.state import Phase, State
from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.roster import LastStatus
from shared.run.usage import seconds_per_step
from tests import examples


def test_a_run_without_workers_says_what_it_waits_for_and_who_is_missing(
    client: TestClient, scheduler: Scheduler
) -> None:
    scheduler.state = State()
    run = client.get("/v1/run").json()
    assert (run["phase"], run["waiting_for"]) == ("waiting", "trainer")
    assert run["missing_workers"] == ["rollout", "reward", "trainer"]
    joined = WorkerJoined("trainer-0-a", "trainer-0", "trainer")
    scheduler.state, _ = step(scheduler.plan, scheduler.state, joined, 0.0)
    assert client.get("/v1/run").json()["missing_workers"] == ["rollout", "reward"]
    colocated = examples.with_schedule(scheduler.plan, mode="colocated")
    scheduler.plan = colocated
    scheduler.state, _ = step(colocated, State(), joined, 0.0)
    assert client.get("/v1/run").json()["missing_workers"] == ["reward"]
    scheduler.plan = examples.with_schedule(colocated, mode="sequential")
    assert client.get("/v1/run").json()["missing_workers"] == ["rollout", "reward"]


def test_encoders_are_shown_and_missed_only_where_the_run_needs_them(
    client: TestClient, scheduler: Scheduler
) -> None:
    assert "encoder" not in client.get("/v1/run").json()["num_workers"]
    scheduler.plan = replace(scheduler.plan, needs_encoder=True)
    run = client.get("/v1/run").json()
    assert run["num_workers"] == {"rollout": 1, "reward": 0, "trainer": 0, "encoder": 0}
    assert run["missing_workers"] == ["reward", "trainer", "encoder"]
    status = examples.status("encoder", "encoding", note="no prompts")
    scheduler.roster.statuses["encoder-0-a"] = LastStatus(status, 0.0)
    assert client.get("/v1/run").json()["missing_workers"] == ["reward", "trainer"]
    [shown] = [each for each in client.get("/v1/workers").json() if each["use"] is None]
    assert (shown["service"], shown["activity"], shown["note"]) == (
        "encoder", "encoding", "no prompts",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "waits_for"),
    [("paused", "operator"), ("stopped", "operator"), ("failed", "operator"),
     ("finished", "nothing")],
)  # fmt: skip
def test_a_run_that_does_not_go_on_waits_for_no_worker(
    client: TestClient, scheduler: Scheduler, phase: Phase, waits_for: str
) -> None:
    scheduler.state = replace(scheduler.state, phase=phase)
    run = client.get("/v1/run").json()
    assert (run["waiting_for"], run["missing_workers"]) == (waits_for, [])


def test_a_worker_shows_its_own_seconds_per_sample_and_nobody_elses(
    client: TestClient, scheduler: Scheduler
) -> None:
    for service in ("reward", "trainer", "rollout"):
        status = examples.status(service, "starting", worker=f"{service}-9")
        scheduler.roster.statuses[status.address] = LastStatus(status, 0.0)
    costs = scheduler.state.costs.observe_rollout("rollout-0-a", 0.5)
    costs = costs.observe_rollout("trainer-9-a", 0.7)
    scheduler.state = replace(scheduler.state, costs=costs)

    workers = client.get("/v1/workers").json()
    shown = {worker["worker"]: worker["seconds_per_sample"] for worker in workers}
    assert shown == {"rollout-0": 0.5, "reward-9": None, "rollout-9": None, "trainer-9": 0.7}


def test_the_pace_is_the_median_of_the_newest_steps() -> None:
    assert seconds_per_step([]) is None
    assert seconds_per_step([1.0, 1.0, 8.0]) == 1.0
