"""Services that are told to end while they work: they end by themselves, and nothing is lost."""

import signal
import time
from pathlib import Path

import pytest
import structlog

from tests.storm.cluster import Cluster, cluster, every_service, until
from tests.storm.judge import violations_of
from tests.storm.small import small

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.clock]
ENDS_WITHIN_S = 30.0
log = structlog.get_logger()


async def told_to_end(run: Cluster, name: str) -> tuple[float, int | None]:
    """Return the seconds that it took to end, and its exit code."""
    process = run.children[name].process
    began = time.monotonic()
    run.send(name, signal.SIGTERM)
    await until(lambda: not process.is_alive())  # type: ignore[union-attr]
    return time.monotonic() - began, process.exitcode  # type: ignore[union-attr]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("times", [12, pytest.param(100, marks=pytest.mark.night)])
async def test_a_service_that_is_told_to_end_does_so_under_load(tmp_path: Path, times: int) -> None:
    setting = small(tmp_path, steps=100_000, tag=1, trainer={"H100": 2})
    async with cluster(tmp_path / "run", setting, stores_in="s3") as run:
        await run.until_step(2)
        services, found = every_service(setting), list[tuple[float, int | None]]()
        for number in range(times):
            found.append(await told_to_end(run, services[number % len(services)]))
            if number % 4 == 3:
                await run.until_step(await run.num_commits())
        seconds = sorted(each for each, _ in found)
        log.info("ended", times=times, median=round(seconds[times // 2], 2), longest=seconds[-1])
        assert {code for _, code in found} == {0}
        assert seconds[-1] <= ENDS_WITHIN_S
        assert await violations_of(run) == []
