"""The store's disk is full for a while: whoever stores waits, and goes on when there is room."""

import os
import time
from pathlib import Path

import pytest
import structlog

from tests.storm.cluster import cluster
from tests.storm.judge import violations_of
from tests.storm.small import small
from tests.storm.strikes import DISKS, fill_store

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.clock, pytest.mark.timeout(400)]
FULL_S = (4.0, 15.0)
RESUMES_S = 30.0
"""Longest time from the moment in which there is room to the next step."""
log = structlog.get_logger()


@pytest.mark.skipif(os.geteuid() != 0 and not os.environ.get("CI"), reason="only root mounts")
async def test_a_run_goes_on_when_the_store_has_room_again(tmp_path: Path) -> None:
    setting = small(tmp_path, steps=100_000, tag=1, trainer={"H100": 2})
    disks = {"objects": DISKS["objects"]}
    async with cluster(tmp_path / "run", setting, stores_in="s3", disks=disks) as run:
        await run.until_step(2)
        for seconds in FULL_S:
            await fill_store(run, seconds)
            began, step = time.monotonic(), await run.num_commits()
            await run.until_step(step, seconds=120)
            waited = time.monotonic() - began
            log.info("store_was_full", seconds=seconds, next_step_after=round(waited, 1))
            assert waited <= RESUMES_S
            await run.until_step(step + 3)
        assert all(not n for n in run.num_deaths.values()), run.num_deaths
        assert await violations_of(run) == []
