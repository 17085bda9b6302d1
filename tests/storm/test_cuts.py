"""Each service is cut off from each broker that it talks to, for a while, and nothing is lost."""

import asyncio
import random
import time
from pathlib import Path

import pytest
import structlog

from tests.storm.cluster import Cluster, cluster
from tests.storm.judge import violations_of
from tests.storm.proxy import Links
from tests.storm.small import small

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.clock]
HEALED_S = 10.0
"""Longest time from the healing of a cut to the next step."""
log = structlog.get_logger()


async def cut(run: Cluster, ends: tuple[str, str], seconds: float) -> float:
    """Cut a service off from a broker; return the seconds from healing to the next step."""
    assert run.links is not None
    await run.links.cut([run.links.each[ends]], seconds)
    began, step = time.monotonic(), await run.num_commits()
    await run.until_step(step)
    return time.monotonic() - began


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "lengths", [(1.0,), pytest.param((1.0, 5.0, 30.0), marks=pytest.mark.night)], ids=str
)
async def test_a_cut_between_any_two_loses_nothing_and_work_goes_on_when_it_heals(
    tmp_path: Path, lengths: tuple[float, ...]
) -> None:
    setting = small(tmp_path, steps=100_000, tag=1, trainer={"H100": 2}, gradient_help=True)
    links = Links(random.Random(1))
    async with cluster(tmp_path / "run", setting, stores_in="s3", links=links) as run:
        await run.until_step(2)
        pairs = [ends for ends, link in links.each.items() if link.is_used]
        assert {service for service, _ in pairs} == set(run.children) - {
            "nats",
            "valkey",
            "objects",
        }
        waits: dict[str, float] = {}
        for seconds in lengths:
            for ends in pairs:
                waits[f"{'-'.join(ends)} {seconds:.0f} s"] = await cut(run, ends, seconds)
                await asyncio.sleep(0.5)
        log.info("healed", pairs=len(pairs), **{k: round(v, 1) for k, v in waits.items()})
        assert await violations_of(run) == []
        assert max(waits.values()) <= HEALED_S
