"""A live scheduler on real brokers, and a trainer that commits what a test wants."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from services.scheduler.shell import app
from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.housekeeping import read_kept_chain
from shared.bus.bus import Bus
from shared.cancellation import stop
from shared.run.chain import Chain
from shared.run.commits import CommitRecord, commit
from shared.run.layout import stored_batches
from shared.run.versions import VersionIndex
from shared.store import ObjectStore
from tests import examples
from tests.waiting import until

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
        await until(lambda: self.scheduler.health.ready)

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


def after_reading_the_chain(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Awaitable[None]]
) -> None:
    """What happens between the scheduler's reading of the commits and of the streams."""

    async def read(store: ObjectStore, run: str) -> Chain:
        chain = await read_kept_chain(store, run)
        await happens()
        return chain

    monkeypatch.setattr(app, "read_kept_chain", read)
