"""Fluid devices as processes of their own, through the real services."""

import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from digenrl.local.processes.starter import STARTER_VARIABLE
from shared.process.failpoints import VARIABLE
from tests.e2e.local_run import PATIENCE_S, SMALL, LocalRun, StartRun, recipe_of

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(600)]

Write = Callable[..., Path]
FLUID = SMALL | {
    "schedule.mode": "fluid", "rollout.workers": 0, "trainer.devices": 3, "trainer.updates": 1,
}  # fmt: skip


@pytest.fixture
def recipe_with(tmp_path: Path) -> Write:
    def write(**changes: Any) -> Path:
        given = {key.replace("__", "."): value for key, value in changes.items()}
        return recipe_of(tmp_path, {**FLUID, **given})

    return write


def test_every_member_may_be_killed_while_sums_go_through_a_process_group(
    start_run: StartRun, recipe_with: Write
) -> None:
    steps = 8
    run = start_run("--steps", str(steps), recipe=recipe_with(trainer__exchange="group"))
    for step in range(1, steps - 1):
        run.wait_for(partial(_is_past, step))
        run.member(f"trainer-{step % 3}").kill()
    summary = run.finish()
    assert summary["commits"] == steps
    assert summary["samples_trained"] == steps * 3 * 4
    assert '"by": "group"' in _log(run, "trainer-0")


def test_members_step_while_they_generate_and_no_group_is_staler_than_one(
    start_run: StartRun, recipe_with: Write
) -> None:
    steps = 6
    recipe = recipe_with(schedule__max_staleness=1, trainer__devices=2)
    run = start_run("--steps", str(steps), recipe=recipe)
    run.wait_for(partial(_is_past, 2))
    run.member("trainer-1").kill()
    summary = run.finish()
    assert summary["commits"] == steps
    assert summary["samples_trained"] == steps * 3 * 4
    assert set(summary["schedule"]["staleness"]) == {"0", "1"}
    assert "version_taken" in _log(run, "trainer-0")


POINTS = ("generates", "trains", "exchanges", "holds", "stepped")


@pytest.mark.night
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("staleness", [0, 1])
def test_members_that_are_killed_at_each_point_cost_no_sample_and_no_batch(
    start_run: StartRun, recipe_with: Write, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes join, and each is killed by itself at its point: while it generates, after a
    backward pass, in the exchange, between the sum and the step, after the step, before the record
    of its version, and as the one that commits it: once others may fetch its weights, and with all
    of it stored."""
    monkeypatch.setenv(STARTER_VARIABLE, "off")
    recipe = recipe_with(
        trainer__devices=1, rollout__workers=1 - staleness, schedule__max_staleness=staleness
    )
    run = start_run("--steps", "2000", recipe=recipe)
    run.wait_for(partial(_is_past, 1))
    joined = {point: _joins(run, point) for point in POINTS}
    assert {p: each.wait(PATIENCE_S) for p, each in joined.items()} == dict.fromkeys(POINTS, -9)
    # The scheduler has the first member commit; without it, the one that has joined.
    for point in ("offered", "commits"):
        committing = _joins(run, point)
        run.wait_for(partial(_is_at_work, run, f"trainer-z-{point}"))
        run.member("trainer-0").kill()
        assert committing.wait(PATIENCE_S) == -signal.SIGKILL
    step = run.get("/v1/run")["step"]
    run.wait_for(partial(_is_past, step + 2))  # it goes on without them
    batches = run.get("/v1/batches")
    committed = {b["batch"]: sum(b["staleness"].values()) for b in batches if _is_committed(b)}
    assert committed == dict.fromkeys(range(min(committed), max(committed) + 1), 3 * 4)
    run.kill_everything()


GROUPS: dict[str, Any] = {
    "trainer__devices": 4, "trainer__shard_devices": 2,
    "rollout__workers": 1, "model__trained": "full", "algorithm__kl_beta": 0.0,
    "trainer__learning_rate": 1e-5,
}  # fmt: skip


def test_a_lost_rank_costs_its_group_and_nothing_else(
    start_run: StartRun, recipe_with: Write
) -> None:
    """All weights on two groups of two ranks: the group without a rank ends, the other one goes on,
    and the first takes part again once it is started anew."""
    steps = 6
    run = start_run("--steps", str(steps), recipe=recipe_with(**GROUPS))
    for step in (1, 3):
        run.wait_for(partial(_is_past, step))
        ranks = run.member(f"trainer-{step // 2}").children()
        max(ranks, key=lambda each: each.pid).kill()  # the follower
    summary = run.finish()
    assert summary["commits"] == steps
    assert summary["samples_trained"] == steps * 3 * 4
    assert summary["onpolicy_ratio_error_max"] <= 1e-5
    assert "version_fetched" in _log(run, "trainer-0")


@pytest.mark.night
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("updates", [1, 3])
def test_groups_that_lose_a_rank_at_each_point_cost_no_sample_and_no_batch(
    start_run: StartRun, recipe_with: Write, updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STARTER_VARIABLE, "off")
    changes = {**GROUPS, "trainer__devices": 2, "trainer__updates": updates}
    run = start_run("--steps", "2000", recipe=recipe_with(**changes))
    run.wait_for(partial(_is_past, 1))
    points = [each for each in POINTS if each != "generates"]
    for point in (*points, *(["updated"] if updates > 1 else [])):
        assert _joins(run, point).wait(PATIENCE_S) == 1, point
    for point in ("offered", "commits"):
        committing = _joins(run, point)
        run.wait_for(partial(_is_at_work, run, f"trainer-z-{point}"))
        run.member("trainer-0").kill()
        assert committing.wait(PATIENCE_S) == 1, point
    step = run.get("/v1/run")["step"]
    run.wait_for(partial(_is_past, step + 2))
    batches = run.get("/v1/batches")
    committed = {b["batch"]: sum(b["staleness"].values()) for b in batches if _is_committed(b)}
    assert committed == dict.fromkeys(range(min(committed), max(committed) + 1), 3 * 4)
    run.kill_everything()


def _is_at_work(run: LocalRun, name: str, _view: dict[str, Any]) -> bool:
    workers = run.get("/v1/workers")
    return any(each["worker"] == name for each in workers)


def _is_committed(batch: dict[str, Any]) -> bool:
    return bool(batch["status"] == "committed")


def _joins(run: LocalRun, point: str) -> "subprocess.Popen[bytes]":
    """Start another member that ends when it comes to a point."""
    return run.join(f"trainer-z-{point}", {VARIABLE: f"fluid.{point}"})


def _is_past(step: int, view: dict[str, Any]) -> bool:
    return bool(view["step"] >= step)


def _log(run: LocalRun, name: str) -> str:
    return (run.folder / "logs" / f"{name}.log").read_text()
