"""What a member stores of a version, in which order, and who makes the first one."""

import asyncio
import contextlib
from collections.abc import Callable, MutableMapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import structlog

from services.trainer.engine.storing import store_states
from services.trainer.fluid import committing, versions
from shared.messages import subjects
from shared.messages.contracts import ObjectRef, PolicyPublished
from shared.messages.fluid import CommitVersion, WeightsStored
from shared.process.worker import Worker
from shared.recipe.recipe import Recipe, override
from shared.run.commits import CommitRecord, commit, newest_commit
from shared.run.layout import first_version_key
from shared.run.shards import open_tensors
from shared.store import ObjectStore
from tests.trainer.fluid.director import Director, directing
from tests.trainer.fluid.test_members import FLUID, thirds

Start = Callable[[], AbstractAsyncContextManager[Director]]


@pytest.fixture
def direct(nats_url: str, tmp_path: Path, recipe: Recipe) -> Start:
    return lambda: directing(nats_url, tmp_path / "objects", override(recipe, FLUID))


def test_weights_can_be_fetched_before_the_states_and_the_record_are_stored(
    direct: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        released = asyncio.Event()

        async def held_back(*given: Any) -> ObjectRef:
            await released.wait()
            return await store_states(*given)

        async with direct() as director:
            await director.start("a", "b")
            monkeypatch.setattr(committing, "store_states", held_back)
            await director.open(0, by="a")
            parts = thirds(director.recipe, "abb")
            await director.train(0, parts)
            message = await director.exchange(0, director.shares(parts), committer="a")
            [first, _] = await director.step(message, 2)
            [told] = await director.told(WeightsStored, 1)
            assert (told.worker, told.policy, told.attempt) == ("a", first.policy, 0)
            parts_of = await open_tensors(director.store, told.weights)
            assert [part async for part in parts_of.parts()] != []
            await director.chain_has(1)
            released.set()
            assert (await director.record(1)).weights == told.weights

    asyncio.run(scenario())


def test_a_version_is_announced_though_the_answer_to_its_commit_was_lost(
    direct: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's client sends the record again, and finds it there."""

    async def loses_the_answer(*given: Any) -> None:
        await commit(*given)
        await commit(*given)

    async def scenario() -> None:
        monkeypatch.setattr(committing, "commit", loses_the_answer)
        async with direct() as director:
            await director.start("a", "b")
            await director.batch(0, thirds(director.recipe, "abb"), committer="a")
            subject = subjects.event_subject(director.bus.run, "policy_published")
            follow = director.bus.follow(subjects.EVT, [subject])
            async with asyncio.timeout(20), contextlib.aclosing(follow) as announced:
                async for each in announced:
                    if isinstance(each.message, PolicyPublished) and each.message.policy.version:
                        break

    asyncio.run(scenario())


@pytest.mark.slow
def test_two_that_commit_at_once_make_one_version(direct: Start) -> None:
    async def scenario() -> None:
        async with direct() as director:
            await director.start("a", "b")
            await director.open(0, by="a")
            parts = thirds(director.recipe, "abb")
            await director.train(0, parts)
            message = await director.exchange(0, director.shares(parts), committer="a")
            await director.step(message, 2)
            await director.bus.publish(CommitVersion(batch=0, attempt=0, number=0, worker="b"))
            record = await director.batch(1, thirds(director.recipe, "abb"), committer="b")
            assert record.policy.version == 2
            await director.chain_has(3)

    asyncio.run(scenario())


def _has_failed(logs: list[MutableMapping[str, Any]]) -> bool:
    return "commit_failed" in {each["event"] for each in logs}


def _version_of(worker: Worker) -> int | None:
    return None if worker.holds is None else worker.holds.version


def test_a_member_whose_groups_the_bus_has_lost_goes_back_to_the_version_before(
    direct: Start,
) -> None:
    """It could never commit its step, and would train nothing else."""

    async def scenario() -> None:
        async with direct() as director:
            await director.start("a")
            await director.open(0, by="a")
            parts = thirds(director.recipe, "aaa")
            await director.train(0, parts)
            message = await director.exchange(0, director.shares(parts), committer="a")
            await director.bus.jetstream.purge_stream(subjects.TRAIN.name)
            worker = director.members["a"].worker
            with structlog.testing.capture_logs() as logs:
                await director.step(message, 1)
                await director.until(lambda: _has_failed(logs) and _version_of(worker) == 0)
            await director.chain_has(1)

    asyncio.run(scenario())


def test_one_member_makes_the_first_version_and_nobody_reads_it(direct: Start) -> None:
    """Its weights and states are many bytes, and all begin with the same."""

    async def scenario() -> None:
        async with direct() as director:
            with structlog.testing.capture_logs() as logs:
                await director.start("a", "b", "c")
            events = [each["event"] for each in logs]
            assert events.count("committed") == 1 and "committed_by_another" not in events
            assert "version_fetched" not in events
            assert {each.worker.policy_version for each in director.members.values()} == {0}

    asyncio.run(scenario())


@pytest.mark.parametrize("claim", [b'{"maker": "gone"}', b"{"])
def test_the_first_version_is_made_though_the_one_that_wanted_to_has_died(
    claim: bytes, direct: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "FIRST_S", 1.0)

    async def scenario() -> None:
        async with direct() as director:
            await director.store.create(first_version_key(director.bus.run), claim)
            await director.start("a")
            assert (await director.record(0)).worker == "a"

    asyncio.run(scenario())


def test_a_member_that_is_started_again_makes_the_version_that_it_wanted_to(direct: Start) -> None:
    async def scenario() -> None:
        async with direct() as director:
            await director.store.create(first_version_key(director.bus.run), b'{"maker": "a"}')
            with structlog.testing.capture_logs() as logs:
                await director.start("a")
            assert "first_version_late" not in {each["event"] for each in logs}

    asyncio.run(scenario())


def test_a_member_waits_for_a_first_commit_that_the_store_shows_late(
    direct: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = list[CommitRecord]()

    async def late(store: ObjectStore, run: str) -> CommitRecord | None:
        found = await newest_commit(store, run)
        if found is None or hidden:
            return found
        hidden.append(found)
        return None

    monkeypatch.setattr(versions, "newest_commit", late)

    async def scenario() -> None:
        async with direct() as director:
            await director.start("a")
            assert hidden and director.members["a"].worker.policy_version == 0

    asyncio.run(scenario())
