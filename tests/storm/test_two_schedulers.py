"""Two schedulers of one run: one commands, the other takes over, and neither is believed late."""

import asyncio
import signal
import time
from functools import partial
from pathlib import Path
from statistics import median

import pytest
import structlog

from tests.storm.cluster import Cluster, cluster, every_service, until_true
from tests.storm.judge import violations_of
from tests.storm.small import small

pytestmark = [pytest.mark.run, pytest.mark.timeout(120)]
STEPS = 400
log = structlog.get_logger()
BOTH = ("scheduler", "scheduler-1")


async def commanding(run: Cluster) -> str:
    """Return the scheduler that commands, as soon as one does."""
    found = list[str]()

    async def look() -> bool:
        found[:] = [name for name in BOTH if (await run.status(name))[0] == 200]
        return bool(found)

    await until_true(look)
    assert len(found) == 1
    return found[0]


async def until_commands(run: Cluster, name: str) -> float:
    """Return the seconds until this scheduler commands."""
    began = time.monotonic()

    async def look() -> bool:
        return (await run.status(name))[0] == 200

    await until_true(look)
    return time.monotonic() - began


def other(name: str) -> str:
    return BOTH[1 - BOTH.index(name)]


async def stands_by(run: Cluster, name: str) -> bool:
    """Return whether a scheduler answers that another one commands."""
    return (await run.status(name))[1].startswith("standby")


@pytest.mark.slow
@pytest.mark.clock
@pytest.mark.night
@pytest.mark.timeout(900)
async def test_each_of_ninety_takeovers_is_over_within_five_seconds(tmp_path: Path) -> None:
    ends = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "told to end": signal.SIGTERM}
    seconds: dict[str, list[float]] = {why: [] for why in ends}
    setting = small(tmp_path, steps=100_000, tag=1, trainer={"H100": 2})
    services = [*every_service(setting), "scheduler-1"]
    async with cluster(tmp_path / "run", setting, services=services) as run:
        await run.until_step(1)
        for number in range(90):
            why = tuple(ends)[number % 3]
            first = await commanding(run)
            await until_true(partial(stands_by, run, other(first)))
            await asyncio.sleep(0.11 * (number % 7))  # not always at the same moment of a batch
            run.children[first].kept = why == "stopped"
            run.send(first, ends[why])
            seconds[why].append(await until_commands(run, other(first)))
            run.children[first].kept = True
            if why == "stopped":
                run.send(first, signal.SIGCONT)
            await until_true(partial(stands_by, run, first))
        assert await violations_of(run) == []
    for why, each in seconds.items():
        log.info("takeovers", why=why, median=median(each), longest=max(each))
    assert max(map(max, seconds.values())) <= 5
