"""The trainer's service over devices without torch: what it counts, and what it commits when."""

import asyncio
import time

import pytest

from shared.errors import BatchFailed, OutOfMemory
from shared.learning.advantages import batch_scale, population_std
from shared.learning.metrics import STEP_METRICS, scorer_of
from shared.messages.contracts import (
    FragmentFailed,
    GroupFailed,
    GroupTrained,
    OperatorRequest,
    PolicyPublished,
    RunFailed,
)
from shared.run.commits import CommitRecord, newest_commit, record_digest
from shared.store import ObjectStore
from tests import examples
from tests.trainer.cluster import Start
from tests.trainer.fakes import digest_of

PAUSE_S = 0.5


async def test_one_device_trains_whole_groups_and_commits_once_all_are_in(trainer: Start) -> None:
    async with trainer() as run:
        run.run_freely()
        await run.send(0, 1, 0)
        first = await run.commit(1)
        await run.send(1, 0, 1)
        second = await run.commit(2)
        assert run.training.log == [
            "restore fresh", "d0 train 0/1 0-3", "d0 train 0/0 0-3", "step 0",
            "d0 train 1/0 0-3", "d0 train 1/1 0-3", "step 1",
        ]  # fmt: skip
        assert second.parent == record_digest(first.encode())
        assert [group.group for group in first.trained] == [0, 1]
        assert all(event.seconds > 0 for event in await run.told(GroupTrained, 4))
        assert [e.policy for e in await run.told(PolicyPublished, 2)] == [
            first.policy, second.policy,
        ]  # fmt: skip


async def test_a_version_names_what_generates_and_what_is_trained(trainer: Start) -> None:
    """A trainer goes back to both of them."""
    async with trainer() as run:
        run.run_freely()
        first = await run.commit(0)
        assert first.trained_weights is None and first.learned.ref == first.weights
        run.training.lags = True
        await run.send(0, 0, 1)
        second = await run.commit(1)
        assert second.policy.weights_digest == digest_of(b"fresh")
        assert second.learned.digest == digest_of(run.training.adapter)
        assert await run.store.get(second.weights) == b"fresh"
        assert await run.store.get(second.learned.ref) == run.training.adapter
        [published] = await run.told(PolicyPublished, 1)
        assert published.policy == second.policy
        adapter = run.training.adapter
        run.training.faults = [OutOfMemory("70 GiB of 79")]
        await run.send(1, 0, 1)
        await run.commit(2)
        assert f"restore {adapter.decode()}" in run.training.log


async def test_each_object_of_a_group_is_read_once(trainer: Start) -> None:
    async with trainer() as run:
        run.run_freely()
        await run.send(0, 0, 1)
        await run.commit(1)
        paths = [key for key in run.backend.keys_read if key.startswith("test/batches/")]
        assert len(paths) == len(set(paths)) + 1, "the conditions, once for each of two groups"


async def test_in_index_order_a_group_that_was_none_is_taken_when_it_comes_again(
    trainer: Start,
) -> None:
    async with trainer(trainer__deterministic=True) as run:
        run.run_freely()
        await run.send(0, 1)
        await run.send(0, 0, content="no group")
        [failed] = await run.told(GroupFailed)
        assert (failed.group, failed.attempt) == (0, 0)
        await run.send(0, 0, attempt=1)
        record = await run.commit(1)
        assert [group.attempt for group in record.trained] == [1, 0]


async def test_with_several_updates_a_later_part_waits_for_the_step_before(trainer: Start) -> None:
    async with trainer(trainer__updates=2, batch__groups=4) as run:
        run.run_freely()
        await run.send(0, 3, 1)
        await run.send(0, 2, content="no group")
        await run.send(0, 0)
        [failed] = await run.told(GroupFailed)
        assert failed.group == 2
        await run.send(0, 2, attempt=1)
        record = await run.commit(1)
        assert run.training.log[1:] == [
            "d0 train 0/1 0-3", "d0 train 0/0 0-3", "step 0",
            "d0 train 0/3 0-3", "d0 train 0/2 0-3", "step 0",
        ]  # fmt: skip
        assert [group.group for group in record.trained] == [0, 1, 2, 3]
        assert record.policy.version == 1
        assert record.metrics["loss"] == 0.5


async def test_groups_without_advantage_are_neither_fetched_nor_trained(trainer: Start) -> None:
    async with trainer() as run:
        run.run_freely()
        await run.send(0, 0, advantages=(0.0,) * 4, content="gone")
        await run.send(0, 1)
        await run.commit(1)
        assert run.training.log[1:] == ["d0 train 0/1 0-3", "step 0"]
        assert run.training.adapter == b"fresh+8"
        events = {event.group: event for event in await run.told(GroupTrained, 2)}
        assert events[0].seconds == 0 < events[1].seconds


async def test_with_a_kl_term_they_are_trained_where_the_algorithm_keeps_them(
    trainer: Start,
) -> None:
    changes = {"algorithm__kl_beta": 0.1, "algorithm__zero_advantages": "kept"}
    async with trainer(**changes) as run:
        run.run_freely()
        await run.send(0, 0, 1, advantages=(0.0,) * 4)
        await run.commit(1)
        assert len(run.training.log) == 4


async def test_what_was_fetched_twice_before_its_turn_is_counted_once(trainer: Start) -> None:
    async with trainer(batch__groups=4) as run:
        await run.send(0, 0, 1, 2, 3)
        await run.send(0, 3, attempt=1, content="again")
        again = digest_of(b"again")
        await run.until(lambda: any(again in key for key in run.backend.keys_read))
        run.run_freely()
        assert [group.attempt for group in (await run.commit(1)).trained] == [0] * 4


async def test_what_comes_twice_or_late_is_counted_once(trainer: Start) -> None:
    async with trainer() as run:
        await run.send(0, 0)
        await run.log_holds("d0 train 0/0 0-3")  # and goes on, while it comes again
        await run.send(0, 0, attempt=1)
        run.run_freely()
        await run.told(GroupTrained)
        await run.send(0, 0, attempt=2)
        await run.send(0, 1)
        await run.send(0, 1, attempt=1)
        record = await run.commit(1)  # the fake's step says if a sample was counted twice
        assert [group.attempt for group in record.trained] == [0, 0]
        assert await run.all_told(GroupTrained) >= 2  # again, if it comes again
        assert await run.all_told(GroupFailed) == 0


async def test_a_group_of_an_older_version_than_may_be_trained_is_refused(trainer: Start) -> None:
    async with trainer(schedule__max_staleness=1) as run:
        run.run_freely()
        await run.send(0, 0, 1)
        await run.commit(1)
        await run.send(1, 0, 1)
        await run.commit(2)
        await run.send(2, 0, version=0)
        failed = await run.told(FragmentFailed, 2)
        assert {event.stage for event in failed} == {"admission"}
        assert "by version 0 may not be trained" in failed[0].reason


async def test_the_next_batch_is_trained_while_a_version_is_still_being_stored(
    trainer: Start,
) -> None:
    async with trainer(schedule__max_staleness=1) as run:
        run.run_freely()
        run.backend.held_back = 1
        await run.send(0, 0, 1)
        await run.log_holds("step 0")
        await run.send(1, 0, 1, version=0)
        await run.told(GroupTrained, 4)
        assert run.training.log[-2:] == ["d0 train 1/0 0-3", "d0 train 1/1 0-3"]
        assert await run.all_told(PolicyPublished) == 1, "announced before its commit"
        run.backend.given.set()
        first, second = await run.commit(1), await run.commit(2)
        assert second.parent == record_digest(first.encode())
        assert [group.policy_version for group in second.trained] == [0, 0]
        announced = await run.told(PolicyPublished, 2)
        assert [event.policy for event in announced] == [first.policy, second.policy]
        assert announced[0].seconds > 0


async def test_on_policy_nothing_goes_on_before_a_version_is_stored(trainer: Start) -> None:
    async with trainer() as run:
        run.run_freely()
        run.backend.held_back = 1
        await run.send(0, 0, 1)
        await run.log_holds("step 0")
        await run.send(1, 0, version=0)
        assert run.worker.activity == "committing"
        run.backend.given.set()
        failed = await run.told(FragmentFailed, 2)
        assert "by version 0 may not be trained" in failed[0].reason
        assert run.training.log[-1] == "step 0"


async def test_a_version_that_another_trainer_made_first_ends_what_was_begun_from_ours(
    trainer: Start,
) -> None:
    async with trainer(schedule__max_staleness=1) as run:
        run.backend.held_back = 1
        await run.send(0, 0, 1)
        run.run_freely()
        await run.log_holds("step 0")
        run.training.devices[0].free.clear()
        await run.send(1, 0, 1, version=0)
        await run.log_holds("d0 train 1/0 0-3")
        run.backend.held_back = None
        theirs = await run.commit_as_another(1)
        run.backend.given.set()
        await run.until(lambda: run.worker.activity == "loading_weights")
        run.run_freely()  # a device is never stopped in the middle
        second = await run.commit(2)
        assert second.parent == record_digest(theirs.encode())
        log = run.training.log
        assert log[log.index("restore another") :] == [
            "restore another", "d0 train 1/0 0-3", "d0 train 1/1 0-3", "step 1",
        ]  # fmt: skip
        assert run.training.adapter == b"another+8"


async def test_a_version_that_is_deleted_while_the_trainer_fetches_it_is_passed_over(
    trainer: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trainer() as run:
        run.run_freely()
        old = await run.commit_as_another(1)
        newest = await run.commit_as_another(2)
        found = [old.model_copy(update={"weights": examples.ref("deleted")})]

        async def read(store: ObjectStore, name: str) -> CommitRecord | None:
            return found.pop() if found else await newest_commit(store, name)

        monkeypatch.setattr("services.trainer.app.newest_commit", read)
        await run.send(0, 0, 1)  # its commit comes too late
        await run.send(2, 0, 1)
        assert (await run.commit(3)).parent == record_digest(newest.encode())


@pytest.mark.clock
async def test_a_commit_says_what_its_batch_was(trainer: Start) -> None:
    began = time.monotonic()
    async with trainer(schedule__max_staleness=1) as run:
        run.run_freely()
        await run.commit(0)
        await asyncio.sleep(PAUSE_S)
        sent = time.monotonic()
        await run.send(0, 0, 1)
        first = (await run.commit(1)).metrics
        await run.send(1, 0, version=0)
        await run.send(1, 1)
        second = (await run.commit(2)).metrics
        ended = time.monotonic()
    assert {scorer_of(name)[0] for name in first} <= STEP_METRICS.keys()
    assert first["advantage_std"] == pytest.approx(population_std([1.0, -1.0, 0.5, -0.5]))
    assert first["reward_mean/proxy"] == first["reward_mean"]
    assert first["samples_per_second"] * first["step_seconds"] == pytest.approx(8)
    assert PAUSE_S / 2 < first["step_seconds"] < ended - began, "since it has begun"
    assert 0 < second["step_seconds"] < ended - sent, "since the step before"
    assert (first["staleness_mean"], second["staleness_mean"]) == (0, 0.5)


async def test_advantages_are_said_as_they_count_in_the_gradient(trainer: Start) -> None:
    async with trainer(algorithm__advantage_std="batch", algorithm__kl_beta=0.0) as run:
        run.run_freely()
        await run.send(0, 0, 1, advantages=(1.5, -1.5, 0.5, -0.5))
        record = await run.commit(1)
    rewards = [reward or 0.0 for group in record.trained for reward in group.rewards]
    wanted = batch_scale(rewards) * population_std([1.5, -1.5, 0.5, -0.5])
    assert batch_scale(rewards) != 1
    assert record.metrics["advantage_std"] == pytest.approx(wanted)


async def test_a_batch_that_may_not_be_trained_fails_the_run_and_is_begun_again_when_it_is_resumed(
    trainer: Start,
) -> None:
    async with trainer() as run:
        run.run_freely()
        run.training.faults = [BatchFailed("on-policy ratios are off by 0.3")]
        await run.send(0, 0, 1)
        [failed] = await run.told(RunFailed)
        assert (failed.batch, failed.reason) == (0, "on-policy ratios are off by 0.3")
        assert run.training.log.count("restore fresh") == 1, "it waits for an operator"
        await run.bus.publish(OperatorRequest(action="resume", id="one"))
        record = await run.commit(1)
        assert run.training.log[3:] == [
            "restore fresh", "d0 train 0/0 0-3", "d0 train 0/1 0-3", "step 0",
        ]  # fmt: skip
        assert len(record.trained) == 2


async def test_memory_that_another_process_gives_back_in_time_fails_nothing(trainer: Start) -> None:
    async with trainer() as run:
        run.run_freely()
        run.training.faults = [OutOfMemory("70 GiB of 79")]
        await run.send(0, 0, 1)
        await run.commit(1)
        assert await run.all_told(RunFailed) == 0


async def test_a_batch_that_does_not_fit_fails_the_run_at_the_second_attempt(
    trainer: Start,
) -> None:
    async with trainer() as run:
        run.run_freely()
        run.training.faults = [OutOfMemory(f"70 GiB of 79, {n}") for n in range(2)]
        await run.send(0, 0, 1)
        [failed] = await run.told(RunFailed)
        assert failed.reason == "70 GiB of 79, 1"
