"""The disk of each store is full for a while: it is said, nothing is lost, and the run goes on when
there is room."""

import asyncio
import os
import time
from pathlib import Path

import pytest
import structlog

from services.scheduler.shell.disk_watch import REMEDIES
from shared.telemetry import NATS_STORES_NOTHING
from tests.storm.cluster import Cluster, cluster, until
from tests.storm.disks import FILLER, fill
from tests.storm.judge import violations_of
from tests.storm.small import small
from tests.storm.strikes import DISKS, fill_nats, fill_store

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.clock, pytest.mark.timeout(400)]
SHORT_S = 4.0
"""A time in which a full disk goes by unnoticed."""
SAID_S = 15.0
"""Longest time from a full disk to the alarm."""
RESUMES_S = 30.0
"""Longest time from the moment in which there is room, or NATS was told to end, to the next
step."""
FULL_S = SAID_S + 5.0
log = structlog.get_logger()
root = pytest.mark.skipif(os.geteuid() != 0 and not os.environ.get("CI"), reason="only root mounts")


async def said(run: Cluster, what: str) -> float:
    """Return the seconds until the scheduler says that a disk is full."""
    began, beginning = time.monotonic(), REMEDIES[what].split("(")[0]

    async def is_said() -> bool:
        code, reason = await run.status("scheduler")
        return code == 503 and beginning in reason

    await run.until(is_said, f"an alarm that {beginning.strip()}")
    return time.monotonic() - began


async def goes_on(run: Cluster, what: str) -> None:
    """Wait until the run has taken a step, and says that all is well."""
    began, step = time.monotonic(), await run.num_commits()
    await run.until_step(step, seconds=120)
    waited = time.monotonic() - began
    log.info("was_full", what=what, next_step_after=round(waited, 1))
    assert waited <= RESUMES_S

    async def is_ready() -> bool:
        return (await run.status("scheduler"))[0] == 200

    await run.until(is_ready, "a scheduler that is ready")
    await run.until_step(step + 3)


@root
async def test_a_run_goes_on_when_the_store_has_room_again(tmp_path: Path) -> None:
    setting = small(tmp_path, steps=100_000, tag=1, trainer={"H100": 2})
    disks = {"objects": DISKS["objects"]}
    async with cluster(tmp_path / "run", setting, stores_in="s3", disks=disks) as run:
        await run.until_step(2)
        await fill_store(run, SHORT_S)
        await goes_on(run, "store")
        async with asyncio.TaskGroup() as tasks:
            saying = tasks.create_task(said(run, "store_takes_nothing"))
            tasks.create_task(fill_store(run, FULL_S))
        log.info("alarm", of="store", after=round(saying.result(), 1))
        assert saying.result() <= SAID_S
        await goes_on(run, "store")
        assert all(not n for n in run.num_deaths.values()), run.num_deaths
        assert await violations_of(run) == []


@root
async def test_a_run_goes_on_when_nats_or_redis_has_room_again(tmp_path: Path) -> None:
    setting = small(tmp_path, steps=100_000, tag=1, trainer={"H100": 2})
    disks = {"nats": DISKS["nats"], "valkey": "64m"}
    async with cluster(tmp_path / "run", setting, disks=disks) as run:
        await run.until_step(2)
        seconds = await fill_nats(run)  # and does as the alarm says
        log.info("alarm", of="nats", after=seconds)
        assert seconds is not None and seconds <= SAID_S, NATS_STORES_NOTHING
        await goes_on(run, "nats")
        await asyncio.to_thread(fill, run.folder / "valkey")
        # What is left of the newest page of its log is room for some versions.
        await until(lambda: run.children["valkey"].num_deaths > 0)
        seconds = await said(run, "redis_takes_nothing")
        log.info("alarm", of="redis", after=round(seconds, 1))
        assert seconds <= SAID_S
        (run.folder / "valkey" / FILLER).unlink()
        await goes_on(run, "redis")
        assert await violations_of(run) == []
