"""The scheduler learns of every version, whenever it is announced: on real brokers."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from services.scheduler.shell import app, goal, housekeeping
from services.scheduler.shell.app import Scheduler
from shared.bus.bus import Bus
from shared.cancellation import stop
from shared.learning.prompts import PromptOrder
from shared.process.service import Health
from shared.run.chain import Chain, read_chain
from shared.run.commits import (
    CommitRecord,
    commit,
)
from shared.run.evaluations import GoldFigures
from shared.run.layout import batch_folder, evaluations_folder, stored_batches
from shared.run.versions import VersionIndex
from shared.store import ObjectStore
from tests import examples

RUN = "test"
WAIT_S = 15.0
METRICS = {"reward_mean": 0.5, "onpolicy_ratio_error": 0.0}


@dataclass
class Trainer:
    """Commits one version after the other, and announces those that it is told to."""

    bus: Bus
    store: ObjectStore
    head: CommitRecord | None = None

    async def commit(
        self, *, announce: bool, rewards: tuple[tuple[float | None, ...], ...] = ()
    ) -> None:
        number = 0 if self.head is None else self.head.policy.version + 1
        trained = tuple(
            examples.trained_group(group, max(0, number - 1), each)
            for group, each in enumerate(rewards)
        )
        metrics = METRICS if number else {}
        self.head = examples.record(
            number, self.head, weights=examples.ref(f"weights-{number}"), trained=trained,
            metrics=metrics,
        )  # fmt: skip
        await commit(self.store, self.head)
        if announce:
            await self.announce()

    async def announce(self) -> None:
        assert self.head is not None
        version = self.head.policy.version
        await self.bus.publish(examples.published(version, weights=self.head.weights))


@dataclass
class Live:
    trainer: Trainer
    scheduler: Scheduler
    index: VersionIndex

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.scheduler.run())
        try:
            yield
        finally:
            [error] = await stop(task)
            if error is not None:
                raise error

    async def recovered(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while not self.scheduler.health.ready:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def knows(self, version: int) -> bool:
        """Whether it comes to know of the version, and of all before it, in some seconds; they are
        indexed after the batch is opened."""
        scheduler = self.scheduler
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while (  # noqa: ASYNC110
                    scheduler.state.policy != examples.policy(version)
                    or await self.index.lookup(version) is None
                ):
                    await asyncio.sleep(0.01)
        assert scheduler.state.batch is not None
        indexed = [await self.index.lookup(number) for number in range(version + 1)]
        return (
            scheduler.state.policy == examples.policy(version)
            and scheduler.state.batch.index == version
            and [step.version for step in scheduler.chain.recent] == list(range(version + 1))
            and all(found and found.policy.version == n for n, found in enumerate(indexed))
        )

    async def keeps(self, batches: list[int]) -> bool:
        """Whether the trajectories of these, and of no other, are left in some seconds."""
        store = self.trainer.store
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while await stored_batches(store, RUN) != batches:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        return await stored_batches(store, RUN) == batches


@pytest.fixture
async def live(nats_url: str, redis_url: str, folder_store: ObjectStore) -> AsyncIterator[Live]:
    async with (
        Bus.connect(nats_url, run=RUN, name="test") as bus,
        VersionIndex.connect(redis_url, run=RUN) as index,
    ):
        await bus.ensure_streams()
        plan = examples.plan(num_batches=9)
        scheduler = Scheduler(plan, bus, folder_store, index, Health())
        yield Live(Trainer(bus, folder_store), scheduler, index)


def after_reading_the_chain(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Awaitable[None]]
) -> None:
    """What happens between the scheduler's reading of the commits and of the streams."""

    async def read(store: ObjectStore, run: str, **options: Any) -> Chain:
        chain = await read_chain(store, run, **options)
        await happens()
        return chain

    monkeypatch.setattr(app, "read_chain", read)


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
    monkeypatch.setattr(housekeeping, "FORGET_AFTER_S", 0.01)
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


@pytest.mark.parametrize("has_died", [False, True])
async def test_a_curriculum_goes_on_from_the_rewards_in_the_commit_records(
    live: Live, has_died: bool
) -> None:
    """Whether the scheduler sees them committed or is started afterwards."""
    live.scheduler.plan = examples.plan(
        num_batches=9, prompts=PromptOrder(examples.PROMPTS, 0, curriculum=0.9)
    )
    rewards = ((1.0, 1.0), (0.0, 1.0))
    await live.trainer.commit(announce=True)
    if has_died:
        for _ in range(4):
            await live.trainer.commit(announce=True, rewards=rewards)
    async with live.running():
        await live.recovered()
        if not has_died:
            for _ in range(4):
                await live.trainer.commit(announce=True, rewards=rewards)
        assert await live.knows(4)
        draws = live.scheduler.plan.prompts.first_draws(2)
        assert draws is not None
        assert live.scheduler.state.draws == draws.seeing([(True, False)] * 4)


async def evaluated(store: ObjectStore, version: int, accuracy: float) -> None:
    key = f"{evaluations_folder(RUN)}/settings/records/{version:08d}.json"
    await store.create(key, json.dumps({"quality": {"gold_accuracy": accuracy}}).encode())


@pytest.mark.parametrize("has_died", [False, True])
async def test_a_run_ends_once_two_evaluations_in_a_row_have_reached_its_goal(
    live: Live, monkeypatch: pytest.MonkeyPatch, has_died: bool
) -> None:
    """Whether the scheduler sees it or is started afterwards; what is in training is committed."""
    monkeypatch.setattr(goal, "LOOK_S", 0.01)
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
            async with asyncio.timeout(WAIT_S):
                while scheduler.state.goal_reached_by is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert scheduler.state.phase == "running", "a batch is in training"
            await live.trainer.commit(announce=True)
        async with asyncio.timeout(WAIT_S):
            while scheduler.state.phase != "finished":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert scheduler.state.policy == examples.policy(3)
        assert scheduler.state.goal_reached_by == 3 and not scheduler.state.batches
