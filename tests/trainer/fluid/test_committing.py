"""What a member stores of a version, in which order, and who makes the first one."""

import asyncio
import contextlib
from collections.abc import MutableMapping
from typing import Any

import pytest
import structlog

from services.trainer import limits
from services.trainer.engine.storing import store_states
from services.trainer.fluid import committing, versions
from shared.messages import subjects
from shared.messages.contracts import ObjectRef, PolicyPublished
from shared.messages.fluid import CommitVersion, WeightsStored
from shared.process.worker import Worker
from shared.run.commits import CommitRecord, commit, newest_commit
from shared.run.layout import first_version_key
from shared.run.shards import open_tensors
from shared.store import ObjectStore
from tests.trainer.fluid.director import Director
from tests.trainer.fluid.test_members import thirds


async def test_weights_can_be_fetched_before_the_states_and_the_record_are_stored(
    director: Director, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = asyncio.Event()

    async def held_back(*given: Any) -> ObjectRef:
        await released.wait()
        return await store_states(*given)

    await director.start("a", "b")
    monkeypatch.setattr(committing, "store_states", held_back)
    parts = thirds(director.recipe, "abb")
    message = await director.summed(0, parts, committer="a")
    [first, _] = await director.step(message, 2)
    [told] = await director.told(WeightsStored, 1)
    assert (told.worker, told.policy, told.attempt) == ("a", first.policy, 0)
    parts_of = await open_tensors(director.store, told.weights)
    assert [part async for part in parts_of.parts()] != []
    await director.chain_has(1)
    released.set()
    assert (await director.record(1)).weights == told.weights


async def test_a_version_is_announced_though_the_answer_to_its_commit_was_lost(
    director: Director, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's client sends the record again, and finds it there."""

    async def loses_the_answer(*given: Any) -> None:
        await commit(*given)
        await commit(*given)

    monkeypatch.setattr(committing, "commit", loses_the_answer)
    await director.start("a", "b")
    await director.batch(0, thirds(director.recipe, "abb"), committer="a")
    subject = subjects.event_subject(director.bus.run, "policy_published")
    follow = director.bus.follow(subjects.EVT, [subject])
    async with asyncio.timeout(20), contextlib.aclosing(follow) as announced:
        async for each in announced:
            if isinstance(each.message, PolicyPublished) and each.message.policy.version:
                break


@pytest.mark.slow
async def test_two_that_commit_at_once_make_one_version(director: Director) -> None:
    await director.start("a", "b")
    parts = thirds(director.recipe, "abb")
    message = await director.summed(0, parts, committer="a")
    await director.step(message, 2)
    await director.bus.publish(CommitVersion(batch=0, attempt=0, number=0, worker="b"))
    record = await director.batch(1, thirds(director.recipe, "abb"), committer="b")
    assert record.policy.version == 2
    await director.chain_has(3)


def _has_failed(logs: list[MutableMapping[str, Any]]) -> bool:
    return "commit_failed" in {each["event"] for each in logs}


def _version_of(worker: Worker) -> int | None:
    return None if worker.holds is None else worker.holds.version


async def test_a_member_whose_groups_the_bus_has_lost_goes_back_to_the_version_before(
    director: Director,
) -> None:
    """It could never commit its step, and would train nothing else."""
    await director.start("a")
    parts = thirds(director.recipe, "aaa")
    message = await director.summed(0, parts, committer="a")
    await director.bus.jetstream.purge_stream(subjects.TRAIN.name)
    worker = director.members["a"].worker
    with structlog.testing.capture_logs() as logs:
        await director.step(message, 1)
        await director.until(lambda: _has_failed(logs) and _version_of(worker) == 0)
    await director.chain_has(1)


async def test_one_member_makes_the_first_version_and_nobody_reads_it(director: Director) -> None:
    """Its weights and states are many bytes, and all begin with the same."""
    with structlog.testing.capture_logs() as logs:
        await director.start("a", "b", "c")
    events = [each["event"] for each in logs]
    assert events.count("committed") == 1 and "committed_by_another" not in events
    assert "version_fetched" not in events
    assert {each.worker.policy_version for each in director.members.values()} == {0}


@pytest.mark.parametrize("claim", [b'{"maker": "gone"}', b"{"])
async def test_the_first_version_is_made_though_the_one_that_wanted_to_has_died(
    claim: bytes, director: Director, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FIRST_VERSION_S", 1.0)
    await director.store.create(first_version_key(director.bus.run), claim)
    await director.start("a")
    assert (await director.record(0)).worker == "a"


async def test_a_member_that_is_started_again_makes_the_version_that_it_wanted_to(
    director: Director,
) -> None:
    await director.store.create(first_version_key(director.bus.run), b'{"maker": "a"}')
    with structlog.testing.capture_logs() as logs:
        await director.start("a")
    assert "first_version_late" not in {each["event"] for each in logs}


async def test_a_member_waits_for_a_first_commit_that_the_store_shows_late(
    director: Director, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = list[CommitRecord]()

    async def late(store: ObjectStore, run: str) -> CommitRecord | None:
        found = await newest_commit(store, run)
        if found is None or hidden:
            return found
        hidden.append(found)
        return None

    monkeypatch.setattr(versions, "newest_commit", late)
    await director.start("a")
    assert hidden and director.members["a"].worker.policy_version == 0
