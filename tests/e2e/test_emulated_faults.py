"""What may happen to a run and does not change it: on real services over emulated devices."""

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.storm.cluster import Cluster, cluster, every_service, until_true
from tests.storm.judge import violations_of
from tests.storm.small import small

pytestmark = [pytest.mark.run, pytest.mark.timeout(120)]


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


@pytest.mark.slow
async def test_with_one_step_of_staleness_samples_are_at_most_one_version_old(
    tmp_path: Path,
) -> None:
    setting = small(tmp_path, max_staleness=1, tag="auto", steps=14)
    async with cluster(tmp_path / "run", setting) as run:
        await run.until_step(2)
        await run.post("/v1/tag", {"mode": "fixed", "groups": 1})
        await run.until_step(setting.steps)
        assert await violations_of(run) == []
        staleness = Counter(
            record.policy.version - 1 - group.policy_version
            for record in await run.commits()
            for group in record.trained
        )
        decisions = (await run.get("/v1/tag"))["decisions"]
    assert set(staleness) == {0, 1}
    assert {decision["reason"] for decision in decisions} >= {"warm-up", "fixed"}
