"""Devices that hang while their process lives and reports: a batch is finished all the same, the
worker says that it hangs, and is started anew."""

import time
from pathlib import Path

import pytest
import structlog

from tests.storm.cluster import Cluster, cluster, until_true
from tests.storm.hanging import HARD_S, ask_to_hang
from tests.storm.judge import violations_of
from tests.storm.small import small

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(120)]
SLOT_S = 1.5
log = structlog.get_logger()


async def hang(run: Cluster, name: str, *, ends: bool = True) -> float:
    """Have a worker hang; return the seconds until the batch that it had is committed."""
    deaths = run.children[name].num_deaths
    ask_to_hang(run.folder, name)
    await until_true(lambda: _has_begun(run, name))
    began, step = time.monotonic(), await run.num_commits()

    async def is_named() -> bool:
        views = await run.get("/v1/workers") or []
        return any(v["worker"] == name and "has not ended" in v["note"] for v in views)

    if ends:
        await until_true(is_named)
    await run.until_step(step)
    seconds = time.monotonic() - began
    await until_true(lambda: _has_died(run, name, deaths))
    return seconds


async def _has_begun(run: Cluster, name: str) -> bool:
    return not (run.folder / f"hang-{name}").exists()


async def _has_died(run: Cluster, name: str, before: int) -> bool:
    return run.children[name].num_deaths > before


async def test_a_batch_is_finished_whoever_hangs(tmp_path: Path) -> None:
    setting = small(tmp_path, steps=400, tag=1, slot_deadline_s=SLOT_S)
    async with cluster(tmp_path / "run", setting) as run:
        await run.until_step(1)
        began, step = time.monotonic(), await run.num_commits()
        await run.until_step(step + 3)
        normal = (time.monotonic() - began) / 4
        for name in ("trainer", "rollout-0", "reward-0"):
            seconds = await hang(run, name, ends=name == "trainer")
            figures = {"seconds": round(seconds, 2), "normal": round(normal, 2)}
            log.info("batch_finished", hung=name, deadline=HARD_S, **figures)
            await run.until_step(await run.num_commits())
        assert "hung" in run.log("trainer")
        assert await violations_of(run) == []
