"""Brokers that are killed under load, again and again: nothing that they have acknowledged is lost,
and the run goes on."""

import signal
import time
from pathlib import Path

import pytest
import structlog

from tests.storm.cluster import Cluster, cluster
from tests.storm.judge import violations_of
from tests.storm.small import small

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.clock]
RESUMES_S = 10.0
"""Longest time from a kill to the second step after it."""
log = structlog.get_logger()


async def killed(run: Cluster, name: str) -> float:
    """Kill a broker, and return the seconds until the run has taken two more steps: the first may
    have been on its way."""
    child, starts = run.children[name], run.children[name].num_starts
    step, began = await run.num_commits(), time.monotonic()
    child.send(signal.SIGKILL)

    async def is_back() -> bool:
        return child.num_starts > starts and child.is_alive

    await run.until(is_back, f"{name} is started again")
    await run.until_step(step + 1)
    return time.monotonic() - began


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("times", [3, pytest.param(100, marks=pytest.mark.night)])
async def test_a_run_goes_on_whichever_broker_is_killed(tmp_path: Path, times: int) -> None:
    """What is acknowledged is in the chain that is judged: a commit, the messages that led to it,
    and the index that names it."""
    setting = small(tmp_path, steps=100_000, tag=1, trainer={"H100": 2})
    async with cluster(tmp_path / "run", setting, stores_in="s3") as run:
        await run.until_step(2)
        found = dict[str, list[float]]()
        for _ in range(times):
            for name in ("nats", "valkey", "objects"):
                found.setdefault(name, []).append(await killed(run, name))
        for name, seconds in found.items():
            ordered = [round(each, 1) for each in sorted(seconds)]
            log.info("killed", broker=name, median=ordered[times // 2], longest=ordered[-5:])
        assert not sum(run.num_deaths[name] for name in run.children if name not in found)
        assert await violations_of(run) == []
        assert max(max(each) for each in found.values()) <= RESUMES_S
