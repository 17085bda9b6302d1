"""A live scheduler deletes the weights and checkpoints that nobody needs any more."""

import asyncio

import pytest

from services.scheduler import limits
from services.scheduler.shell.app import Scheduler
from shared.bus.bus import Bus
from shared.process.service import Health
from shared.run.commits import commit
from shared.run.layout import (
    batches_with_previews,
    checkpoints_folder,
    evaluations_folder,
    set_evaluation_interval,
    weights_folder,
)
from shared.run.previews import PreviewRule, preview_key
from shared.run.retention import Retention
from shared.run.versions import VersionIndex
from shared.store import ObjectStore
from tests import examples
from tests.scheduler.shell.live import RUN, WAIT_S, Live, Trainer

pytestmark = pytest.mark.broker


class StoringTrainer(Trainer):
    """Stores what a trainer does; each version's weights hold its number."""

    async def commit(
        self, *, announce: bool, rewards: tuple[tuple[float | None, ...], ...] = ()
    ) -> None:
        assert not rewards, "what is deleted does not depend on them"
        number = 0 if self.head is None else self.head.policy.version + 1
        data = b"%d" % number
        self.head = examples.record(
            number,
            self.head,
            weights=await self.store.put(weights_folder(RUN), data, suffix=".safetensors"),
            checkpoint=await self.store.put(checkpoints_folder(RUN), data, suffix=".safetensors"),
        )
        await commit(self.store, self.head)
        if announce:
            await self.announce()

    async def kept(self, folder: str) -> set[int]:
        return {int(await self.store.read(key) or b"-1") for key in await self.store.keys(folder)}


@pytest.fixture
def live(
    bus: Bus, index: VersionIndex, folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> Live:
    monkeypatch.setattr(limits, "VERSION_CHECK_S", 0.02)
    plan, retention = examples.plan(num_batches=9), Retention(keep_last=2)
    scheduler = Scheduler(plan, bus, folder_store, index, Health(), retention=retention)
    return Live(StoringTrainer(bus, folder_store), scheduler, index)


async def test_the_last_versions_and_those_that_are_needed_are_left(live: Live) -> None:
    trainer = live.trainer
    assert isinstance(trainer, StoringTrainer)
    await set_evaluation_interval(trainer.store, RUN, 2)
    await trainer.store.write(f"{evaluations_folder(RUN)}/0123/records/00000002.json", b"{}")
    async with live.running():
        await live.recovered()
        status = examples.status("rollout", policy_version=3)
        await trainer.bus.send(status)
        for _ in range(8):
            await trainer.commit(announce=True)
        assert await live.knows(7)
        wanted = {0, 3, 4, 6, 7}  # the first, in use, not measured (4 and 6), the last two
        async with asyncio.timeout(WAIT_S):
            while await trainer.kept(weights_folder(RUN)) != wanted:
                await trainer.bus.send(status)
                await asyncio.sleep(0.02)
    assert await trainer.kept(checkpoints_folder(RUN)) == wanted


async def test_without_a_reader_two_versions_and_the_first_are_left(live: Live) -> None:
    trainer = live.trainer
    assert isinstance(trainer, StoringTrainer)
    for _ in range(6):
        await trainer.commit(announce=True)
    async with live.running():
        async with asyncio.timeout(WAIT_S):
            while await trainer.kept(weights_folder(RUN)) != {0, 4, 5}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    assert len(await trainer.store.keys(f"{RUN}/commits")) == 6


async def with_previews(live: Live, left: set[int]) -> None:
    """Wait until these batches alone have previews."""
    async with asyncio.timeout(WAIT_S):
        while set(await batches_with_previews(live.trainer.store, RUN)) != left:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_previews_of_the_newest_batches_and_of_chosen_ones_are_left(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CLEANUP_DELAY_S", 0.02)
    live.scheduler._cleanup._previews = PreviewRule(frozenset({0, 2}), groups=1, newest=1)
    store = live.trainer.store
    for batch in range(8):
        await store.write(preview_key(RUN, batch, 0, 0, 0), b"pictures")
    async with live.running():
        await live.recovered()
        for _ in range(8):
            await live.trainer.commit(announce=True)
        assert await live.knows(7)
        await with_previews(live, {0, 2, 4, 5, 6, 7})


async def test_previews_that_a_scheduler_has_left_are_cleared_away_by_the_next(live: Live) -> None:
    live.scheduler._cleanup._previews = PreviewRule(frozenset({0}), groups=1, newest=1)
    for batch in range(8):
        await live.trainer.store.write(preview_key(RUN, batch, 0, 0, 0), b"pictures")
    for _ in range(8):
        await live.trainer.commit(announce=True)
    async with live.running():
        await with_previews(live, {0, 4, 5, 6, 7})
