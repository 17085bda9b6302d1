"""The scheduler learns of every version, whenever it is announced: on real brokers."""

import json

import pytest

from services.scheduler import limits
from services.scheduler.shell import goal
from shared.run.evaluations import GoldFigures
from shared.run.layout import batch_folder, evaluations_folder
from shared.store import ObjectStore
from tests import examples
from tests.scheduler.shell.live import RUN, Live, after_reading_the_chain
from tests.waiting import until


async def test_a_version_announced_while_the_scheduler_recovers_is_not_lost(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    await live.trainer.commit(announce=True)
    after_reading_the_chain(monkeypatch, lambda: live.trainer.commit(announce=True))
    async with live.running():
        assert await live.knows(1)


async def test_the_very_first_version_may_be_announced_while_it_recovers(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_reading_the_chain(monkeypatch, lambda: live.trainer.commit(announce=True))
    async with live.running():
        assert await live.knows(0)


@pytest.mark.parametrize("has_died", [False, True])
async def test_of_committed_batches_two_are_kept(
    live: Live, monkeypatch: pytest.MonkeyPatch, has_died: bool
) -> None:
    """Whether the scheduler sees them committed or is started afterwards."""
    monkeypatch.setattr(limits, "CLEANUP_DELAY_S", 0.01)
    store = live.trainer.store
    for batch in range(5):
        await store.put(batch_folder(RUN, batch), b"a trajectory", suffix=".safetensors")
    await live.trainer.commit(announce=True)
    if has_died:
        for _ in range(4):
            await live.trainer.commit(announce=True)
    async with live.running():
        await live.recovered()
        if not has_died:
            for _ in range(4):
                await live.trainer.commit(announce=True)
        assert await live.knows(4)
        assert await live.keeps([2, 3, 4])
        await live.trainer.commit(announce=True)
        assert await live.knows(5)
        assert await live.keeps([3, 4])


async def test_a_version_whose_announcement_is_lost_is_caught_up_with_the_next(live: Live) -> None:
    await live.trainer.commit(announce=True)
    async with live.running():
        assert await live.knows(0)
        await live.trainer.commit(announce=False)
        await live.trainer.commit(announce=True)
        assert await live.knows(2)


async def test_one_committed_in_silence_while_it_recovers_is_caught_up(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    await live.trainer.commit(announce=True)
    after_reading_the_chain(monkeypatch, lambda: live.trainer.commit(announce=False))
    async with live.running():
        await live.recovered()
        await live.trainer.commit(announce=True)
        assert await live.knows(2)


async def test_an_announcement_that_is_in_the_chain_already_changes_nothing(live: Live) -> None:
    for _ in range(2):
        await live.trainer.commit(announce=True)
    async with live.running():
        assert await live.knows(1)
        await live.trainer.announce()
        await live.trainer.commit(announce=True)  # comes after it
        assert await live.knows(2)
        assert len(live.scheduler.committed_at) == 1


async def evaluated(store: ObjectStore, version: int, accuracy: float) -> None:
    key = f"{evaluations_folder(RUN)}/settings/records/{version:08d}.json"
    await store.create(key, json.dumps({"quality": {"gold_accuracy": accuracy}}).encode())


@pytest.mark.parametrize("has_died", [False, True])
async def test_a_run_ends_once_two_evaluations_in_a_row_have_reached_its_goal(
    live: Live, monkeypatch: pytest.MonkeyPatch, has_died: bool
) -> None:
    """Whether the scheduler sees it or is started afterwards; what is in training is committed."""
    monkeypatch.setattr(limits, "VERSION_CHECK_S", 0.01)
    scheduler, store = live.scheduler, live.trainer.store
    scheduler.goal = goal.Goal(GoldFigures(store, RUN, {}), 0.9)
    for version, accuracy in enumerate((0.95, 0.5, 0.92)):
        await live.trainer.commit(announce=True)
        await evaluated(store, version, accuracy)
    if has_died:
        await evaluated(store, 3, 0.9)
        await live.trainer.commit(announce=True)
    async with live.running():
        await live.recovered()
        if not has_died:
            assert await live.knows(2) and scheduler.state.phase == "running"
            await evaluated(store, 3, 0.9)
            await until(lambda: scheduler.state.goal_reached_by is not None)
            assert scheduler.state.phase == "running", "a batch is in training"
            await live.trainer.commit(announce=True)
        await until(lambda: scheduler.state.phase == "finished")
        assert scheduler.state.policy == examples.policy(3)
        assert scheduler.state.goal_reached_by == 3 and not scheduler.state.batches
