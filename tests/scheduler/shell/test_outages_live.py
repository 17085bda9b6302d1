"""A live scheduler whose brokers lose their data or are full, in the middle of a batch."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis.asyncio as redis

from digenrl.local.brokers.embedded import Brokers
from services.scheduler import limits
from services.scheduler.shell.app import Scheduler
from shared.bus.bus import Bus
from shared.bus.streams import stream_config
from shared.messages import subjects, workers
from shared.messages.contracts import (
    FragmentGenerated,
    GenerateFragment,
    OperatorRequest,
    PolicyPublished,
)
from shared.process.service import Health
from shared.run.versions import VersionIndex
from shared.store import ObjectStore
from tests import examples
from tests.brokers import StartProgram, program
from tests.scheduler.shell.live import RUN, Live, Trainer, after_reading_the_chain
from tests.waiting import until

pytestmark = pytest.mark.broker

DEVICE = "rollout-0-12345678"


@dataclass
class Device:
    """A rollout worker that is there, and does nothing with what it is given."""

    bus: Bus
    given: list[GenerateFragment] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def here(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(each) for each in (self._report(), self._receive())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _report(self) -> None:
        while True:
            device = workers.Device(concurrency=1)
            await self.bus.send(examples.status("rollout", address=DEVICE, device=device))
            await asyncio.sleep(0.2)

    async def _receive(self) -> None:
        async for received in self.bus.follow(subjects.TASK, [subjects.tasks_for(RUN, DEVICE)]):
            assert isinstance(received.message, GenerateFragment)
            self.given.append(received.message)


@dataclass
class Stage(Live):
    bus: Bus
    device: Device
    wipe_nats: Callable[[], None]
    redis_url: str


@pytest.fixture
async def stage(
    brokers: Brokers,
    start: StartProgram,
    redis_url: str,
    index: VersionIndex,
    folder_store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Stage]:
    """The streams are there, and version 0 is committed."""
    monkeypatch.setattr(limits, "STREAM_CHECK_S", 0.1)
    nats = program(brokers, "nats")
    server = await asyncio.to_thread(start, nats)

    def wipe() -> None:
        nonlocal server
        server.kill()
        server.wait()
        shutil.rmtree(_folder_of(nats.argv))
        server = start(nats)

    url = brokers.environment["DIGENRL_NATS_URL"]
    async with Bus.connect(url, run=RUN, name="test") as bus:
        await bus.ensure_streams()
        plan = examples.plan(num_batches=9)
        scheduler = Scheduler(plan, bus, folder_store, index, Health())
        trainer = Trainer(bus, folder_store)
        await trainer.commit(announce=True)
        yield Stage(trainer, scheduler, index, bus, Device(bus), wipe, redis_url)


def _folder_of(argv: list[str]) -> Path:
    """Return the folder in which JetStream keeps its streams."""
    return Path(argv[-1]).parent / "jetstream"


async def limit(bus: Bus, stream: subjects.Stream, max_bytes: int) -> None:
    config = stream_config(stream)
    config.max_bytes = max_bytes
    await bus.jetstream.update_stream(config)


async def test_the_run_goes_on_when_nats_has_lost_everything(stage: Stage) -> None:
    async with stage.running(), stage.device.here():
        given = stage.device.given
        await until(lambda: len(given) == 2)
        lost = {task.fragment.slot for task in given}
        await asyncio.to_thread(stage.wipe_nats)
        await until(lambda: len(given) >= 4)
        anew = {task.fragment.slot for task in given[2:]}
        assert not lost & anew, "a late result of the first would take the slot of the second"
        assert {(s.group, s.first_sample) for s in lost} == {
            (s.group, s.first_sample) for s in anew
        }
        events, _ = await stage.bus.stored(subjects.EVT)
        said = [each.message for each in events]
        told = [each.policy.version for each in said if isinstance(each, PolicyPublished)]
        assert told == [0], "a member that had not heard it would wait for it"
        await stage.trainer.commit(announce=True)
        assert await stage.knows(1)
        assert stage.scheduler.health.ready


async def test_what_was_given_out_last_is_not_given_out_again_when_nats_has_lost_everything(
    stage: Stage,
) -> None:
    """Half of a wave of commands has reached its devices when the broker is lost."""
    await limit(stage.bus, subjects.TASK, 600)  # room for one task
    async with stage.running(), stage.device.here():
        given = stage.device.given
        await until(lambda: "DG_TASK: full" in stage.scheduler.health.reason)
        [lost] = [task.fragment.slot for task in given]
        await asyncio.to_thread(stage.wipe_nats)
        await until(lambda: len(given) >= 3)
        assert lost not in {task.fragment.slot for task in given[1:]}


async def test_what_was_given_out_is_still_known_when_nats_loses_everything_twice(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time the scheduler has not restored yet what it knew the first time."""
    num_read = 0

    async def lose_again() -> None:
        nonlocal num_read
        num_read += 1  # before it forgets the open batches, and when it recovers
        if num_read == 2:
            await asyncio.to_thread(stage.wipe_nats)

    async with stage.running(), stage.device.here():
        given = stage.device.given
        await until(lambda: len(given) == 2)
        lost = {task.fragment.slot for task in given}
        after_reading_the_chain(monkeypatch, lose_again)
        await asyncio.to_thread(stage.wipe_nats)
        await until(lambda: len(given) >= 4)
        assert num_read == 4
        assert not lost & {task.fragment.slot for task in given[2:]}


async def test_a_result_that_nobody_was_asked_for_yet_does_not_stop_a_run(stage: Stage) -> None:
    """It comes from a device that waited for NATS, which has lost everything, as the scheduler died
    that had asked for it."""
    late = examples.task()
    await stage.bus.publish(examples.generated(late))
    async with stage.running():
        await until(lambda: not stage.scheduler.state.recovering)
        async with stage.device.here():
            given = stage.device.given
            await until(lambda: len(given) == 2)
            assert late.fragment.slot not in {task.fragment.slot for task in given}


async def test_a_run_that_was_paused_stays_so_when_nats_has_lost_everything(stage: Stage) -> None:
    async with stage.running():
        await stage.recovered()
        await stage.bus.publish(OperatorRequest(action="pause", id="1"))
        await until(lambda: stage.scheduler.state.phase == "paused")
        first = stage.scheduler.roster
        await asyncio.to_thread(stage.wipe_nats)
        await until(lambda: stage.scheduler.roster is not first)
        await until(lambda: stage.scheduler.state.phase == "paused")
        await stage.bus.publish(OperatorRequest(action="resume", id="2"))
        await until(lambda: stage.scheduler.state.phase == "running")


async def test_one_stream_that_is_gone_is_made_again(stage: Stage) -> None:
    async with stage.running(), stage.device.here():
        await until(lambda: len(stage.device.given) == 2)
        await stage.bus.jetstream.delete_stream(subjects.TASK.name)
        await until(lambda: len(stage.device.given) >= 4)
        await stage.trainer.commit(announce=True)
        assert await stage.knows(1)


async def test_results_of_both_open_batches_are_forgotten_when_a_stream_is_gone(
    stage: Stage,
) -> None:
    """One step ahead, batch 1 is generated before version 1 is there. Its fragments are generated
    again under new numbers, so that results of the lost tasks must not be read back."""
    async with stage.running():
        await stage.recovered()
        for batch in (0, 1, 2):
            await stage.bus.publish(examples.generated(examples.task(batch=batch)))
        first = stage.scheduler.roster
        await stage.bus.jetstream.delete_stream(subjects.TASK.name)
        await until(lambda: stage.scheduler.roster is not first)
        await stage.recovered()
        results, _ = await stage.bus.stored(subjects.TRAJ)
        messages = [each.message for each in results]
        batches = [m.fragment.batch for m in messages if isinstance(m, FragmentGenerated)]
        assert batches == [2], "no scheduler has asked for batch 2"


async def test_the_index_is_rebuilt_when_redis_has_lost_everything(stage: Stage) -> None:
    for _ in range(2):
        await stage.trainer.commit(announce=True)
    async with stage.running():
        assert await stage.knows(2)
        async with redis.from_url(stage.redis_url) as client:
            await client.flushall()
        await stage.trainer.commit(announce=True)
        assert await stage.knows(3)


async def test_a_full_stream_is_reported_and_waited_for(stage: Stage) -> None:
    await limit(stage.bus, subjects.TASK, 600)  # room for one task
    health = stage.scheduler.health
    async with stage.running() as _, stage.device.here():
        await until(lambda: "DG_TASK: full" in health.reason)
        assert not health.ready
        assert len(stage.device.given) == 1
        await limit(stage.bus, subjects.TASK, subjects.TASK.max_bytes)
        await until(lambda: health.ready)
        await until(lambda: len(stage.device.given) == 2)
        await stage.trainer.commit(announce=True)
        assert await stage.knows(1)


async def test_a_full_stream_has_room_again_once_batches_are_committed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose messages are kept for people to look at go first."""
    monkeypatch.setattr(limits, "CLEANUP_DELAY_S", 3600.0)
    await stage.trainer.commit(announce=True)
    for first in range(3):
        await stage.bus.publish(examples.task(batch=0, first_sample=first))
    info = await stage.bus.jetstream.stream_info(subjects.TASK.name)
    await limit(stage.bus, subjects.TASK, info.state.bytes + 10)
    async with stage.running(), stage.device.here():
        await until(lambda: len(stage.device.given) == 2)
        assert {task.fragment.batch for task in stage.device.given} == {1}
        await until(lambda: stage.scheduler.health.ready)
