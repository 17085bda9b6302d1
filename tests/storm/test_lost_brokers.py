"""Brokers that lose all of their data in the middle of a run, which goes on."""

import signal
from pathlib import Path

import pytest

from tests.storm.cluster import cluster
from tests.storm.judge import violations_of
from tests.storm.small import small
from tests.storm.strikes import wipe

pytestmark = [pytest.mark.run, pytest.mark.timeout(120)]

STEPS = 8


@pytest.mark.slow
async def test_a_run_goes_on_without_a_person_when_brokers_have_lost_everything(
    tmp_path: Path,
) -> None:
    setting = small(tmp_path, steps=STEPS, tag=1, trainer={"H100": 2})
    async with cluster(tmp_path / "run", setting) as run:
        await run.until_step(2)
        await wipe(run, "valkey")
        await run.until_step(4)
        await wipe(run, "nats")
        await run.until_step(STEPS)
        assert run.children["scheduler"].num_deaths == 0, run.log("scheduler")[-4000:]
        assert await violations_of(run) == []


@pytest.mark.slow
async def test_a_run_goes_on_when_the_scheduler_dies_as_nats_loses_everything(
    tmp_path: Path,
) -> None:
    """Nobody knows then what devices were given that still wait to report it."""
    setting = small(tmp_path, steps=STEPS, tag=1, trainer={"H100": 2})
    async with cluster(tmp_path / "run", setting) as run:
        for step in (2, 5):
            await run.until_step(step)
            run.send("scheduler", signal.SIGKILL)
            await wipe(run, "nats")
        await run.until_step(STEPS)
        assert run.children["scheduler"].num_deaths == 2
        assert await violations_of(run) == []
