"""Schedules on real services over emulated devices: whatever the schedule, the same is trained.

The weights of the emulated cluster are an account of what was trained, so that every run here is
compared, byte for byte, with one process that trains each sample once.
"""

from collections import Counter
from pathlib import Path

import pytest

from bench.cluster.setting import Setting
from shared.run.commits import CommitRecord
from tests.storm.cluster import cluster
from tests.storm.judge import violations_of
from tests.storm.small import small

pytestmark = [pytest.mark.run, pytest.mark.timeout(120)]


async def whole_run(folder: Path, setting: Setting, **recipe: object) -> list[CommitRecord]:
    """Its commits, after every rule was checked."""
    async with cluster(folder / "run", setting, changes=recipe) as run:
        await run.until_step(setting.steps)
        assert await violations_of(run) == []
        return await run.commits()


def samples_by_trainer(records: list[CommitRecord]) -> list[int]:
    """Counts the samples of each batch that lent members have generated."""
    return [
        sum(
            number
            for group in record.trained
            for (_, number, _), worker in zip(group.fragments, group.workers, strict=True)
            if worker.startswith("trainer")
        )
        for record in records[1:]
    ]


@pytest.mark.slow
async def test_help_by_the_trainer_changes_no_byte(tmp_path: Path) -> None:
    setting = small(tmp_path, tag=2, rollout={"H100": 1}, scale=40.0)
    records = await whole_run(tmp_path, setting)
    assert sum(samples_by_trainer(records)) > 0


@pytest.mark.slow
async def test_a_trainer_of_two_devices_generates_its_share_and_changes_no_byte(
    tmp_path: Path,
) -> None:
    setting = small(tmp_path, trainer={"H100": 2}, rollout={"H100": 1}, tag=2)
    records = await whole_run(tmp_path, setting)
    assert all(samples_by_trainer(records)), "of every batch"


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
