"""What may happen to a run and does not change it: on real services over emulated devices."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.garbage import publish_garbage
from tests.storm.cluster import Cluster, cluster, every_service, until, until_true
from tests.storm.judge import violations_of
from tests.storm.small import small

pytestmark = [pytest.mark.run, pytest.mark.timeout(120)]

"""A worker is missed after 5 s of silence, looked for twice a second."""


@pytest.mark.slow
async def test_operators_steer_it_services_die_strangers_write_garbage_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    setting = small(tmp_path, steps=8)
    async with cluster(tmp_path / "run", setting) as run:
        await run.until_step(1)
        await run.post("/v1/run/pause")
        paused = await run.until_run(lambda view: view["phase"] == "paused")
        await write_garbage(run, paused["step"])
        await check_api(run)
        assert (await run.get("/v1/run"))["step"] <= paused["step"] + 1
        for victim in ("rollout-1", "reward-0", "trainer-h100-0", "scheduler"):
            run.send(victim, signal.SIGKILL)
            await until(lambda victim=victim: run.children[victim].num_deaths > 0)  # type: ignore[misc]
        await run.until_run(lambda view: view["phase"] == "paused")
        await run.post("/v1/run/resume")
        view = await run.until_run(lambda view: view["num_quarantined"] >= 4)
        assert view["failure"] is None
        await run.until_step(setting.steps)
        letters = await run.get("/v1/dead-letters?state=all")
        unreadable = [each for each in letters if each["kind"] == "unreadable"]
        assert len({each["subject"] for each in unreadable}) == len(unreadable) >= 4
        assert all("not a message" in each["reason"] for each in unreadable)
        assert await violations_of(run) == []


async def check_api(run: Cluster) -> None:
    everybody = {"rollout", "reward", "trainer"}
    workers = await run.get("/v1/workers")
    assert {one["service"] for one in workers} == everybody
    assert (await run.get("/v1/batches"))[0]["status"] == "in_flight"
    assert (await run.get("/v1/batches/0"))["status"] == "committed"
    assert (await run.get("/v1/versions"))[-1]["version"] == 0
    assert (await run.get("/readyz"))["status"] == "ready"


async def write_garbage(run: Cluster, step: int) -> None:
    """Bytes that are no message, into slots of the batches to come and among the events."""
    subjects = [
        f"task.{step + 2}.0.0.0",
        f"traj.{step + 2}.1.2.0",
        f"rew.{step + 3}.2.0.0",
        f"train.{step + 2}.0.0",
        "evt.policy_published",
    ]
    await publish_garbage(lambda role: run.secrets[role]["DIGENRL_NATS_URL"], "small", subjects)


async def until_ready(run: Cluster) -> None:
    async def ready() -> bool:
        return (await run.status("scheduler"))[0] == 200

    await until_true(ready)


@pytest.mark.slow
async def test_a_run_that_was_stopped_stays_so_over_a_restart_until_it_is_resumed(
    tmp_path: Path,
) -> None:
    setting = small(tmp_path)
    async with cluster(tmp_path / "run", setting) as run:
        await run.until_step(1)
        await run.post("/v1/run/stop")
        await run.until_run(lambda view: view["phase"] == "stopped")
        services = every_service(setting)
        await asyncio.gather(*(run.remove(name, signal.SIGTERM) for name in services))
        for name in services:
            run.add(name)
        await until_ready(run)  # it has read what was requested
        view = await run.until_run(lambda view: view["num_workers"]["rollout"] == 2)
        assert view["phase"] == "stopped"
        stopped_at = await run.num_commits()
        await run.post("/v1/run/resume")
        await run.until_step(setting.steps)
        assert stopped_at <= setting.steps
        assert await violations_of(run) == []


@pytest.mark.slow
async def test_a_loan_of_the_trainer_s_device_ends_by_itself_if_the_scheduler_vanishes(
    tmp_path: Path,
) -> None:
    setting = small(tmp_path, rollout={"H100": 1}, tag=4, scale=10.0, steps=3)
    async with cluster(tmp_path / "run", setting) as run:
        await run.until_step(0)

        async def lent() -> bool:
            return bool((await run.get("/v1/tag") or {"lent": False})["lent"])

        await until_true(lent)
        run.send("scheduler", signal.SIGSTOP)
        await until(lambda: "loan_expired" in run.log("trainer-h100-0"))
        run.send("scheduler", signal.SIGCONT)
        await run.until_step(setting.steps)
        assert await violations_of(run) == []


@pytest.mark.slow
async def test_unequal_workers_join_and_leave_and_the_fast_one_goes_on_alone(
    tmp_path: Path,
) -> None:
    setting = small(tmp_path, rollout={"H100": 1, "H20": 1, "4090": 1}, scale=60.0, steps=1000)
    services = ["scheduler", "rollout-0", "reward-0", "trainer-h100-0"]
    async with cluster(tmp_path / "run", setting, services=services) as run:
        await run.until_step(1)
        run.add("rollout-1")
        run.add("rollout-2")
        await run.until_run(lambda view: view["num_workers"]["rollout"] >= 2)
        await until_true(lambda: has_generated(run, "rollout-01-h20"))
        await run.until_run(lambda view: view["num_workers"]["rollout"] == 3)
        fast, slow, tiny = [
            await worker(run, name)
            for name in ("rollout-00-h100", "rollout-01-h20", "rollout-02-4090")
        ]
        assert fast and slow and tiny
        assert slow["seconds_per_sample"] > 1.5 * fast["seconds_per_sample"]
        assert "the model needs" in tiny["refused"] and tiny["num_in_hand"] == 0
        await run.remove("rollout-1")
        await run.until_step(await run.num_commits() + 2)
        assert await violations_of(run) == []


async def worker(run: Cluster, name: str) -> dict[str, Any] | None:
    views: list[dict[str, Any]] = await run.get("/v1/workers") or []
    return next((view for view in views if view["worker"] == name), None)


async def has_generated(run: Cluster, name: str) -> bool:
    view = await worker(run, name)
    return view is not None and view["seconds_per_sample"] is not None
