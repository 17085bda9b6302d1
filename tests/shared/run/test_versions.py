import asyncio
from dataclasses import replace

import pytest

from shared.errors import IntegrityError, LeaseLost
from shared.run.commits import CommitRecord
from shared.run.versions import Version, VersionIndex
from tests import examples


def version(number: int) -> Version:
    return Version(policy=examples.policy(number), weights=examples.ref(f"weights-{number}"))


def record_of(number: int) -> CommitRecord:
    return examples.record(number, weights=examples.ref(f"weights-{number}"))


async def test_versions_are_published_in_turn_and_only_once(redis_url: str) -> None:
    async with VersionIndex.connect(redis_url, run="test") as index:
        assert await index.lookup(0) is None
        for number in (0, 1, 1, 0):
            await index.publish(version(number))
        assert await index.lookup(1) == version(1)
        with pytest.raises(IntegrityError):
            await index.publish(version(3))
        with pytest.raises(IntegrityError):
            await index.publish(Version(policy=examples.policy(1), weights=examples.ref("other")))


async def test_of_two_that_publish_different_weights_one_wins(redis_url: str) -> None:
    async with VersionIndex.connect(redis_url, run="test") as index:
        rivals = [Version(policy=examples.policy(0), weights=examples.ref(w)) for w in ("a", "b")]
        outcomes = await asyncio.gather(*map(index.publish, rivals), return_exceptions=True)
        assert sum(isinstance(outcome, IntegrityError) for outcome in outcomes) == 1


async def test_the_index_is_rebuilt_from_the_commit_records(redis_url: str) -> None:
    async with VersionIndex.connect(redis_url, run="test") as index:
        for number in range(4):
            await index.publish(version(number))
        await index.rebuild([record_of(0), record_of(1)])
        assert await index.lookup(1) == version(1)
        assert await index.lookup(3) is None
        await index.publish(version(2))


async def test_a_scheduler_whose_epoch_is_over_changes_nothing(redis_url: str) -> None:
    async with VersionIndex.connect(redis_url, run="test") as index:
        old, new = replace(index, epoch=3), replace(index, epoch=8)
        await old.publish(version(0))
        await new.rebuild([record_of(0), record_of(1)])
        with pytest.raises(LeaseLost):
            await old.publish(version(2))
        with pytest.raises(LeaseLost):
            await old.rebuild([record_of(0)])
        assert await index.lookup(1) is not None
        await new.publish(version(2))
