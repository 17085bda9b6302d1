"""1,024 workers that are alive and do nothing, against the scheduler over three batches."""

import asyncio
import time
from functools import partial
from multiprocessing import get_context

import pytest
import structlog

from services.scheduler.shell.app import Scheduler
from shared.bus.bus import Bus
from shared.messages import subjects
from shared.messages.contracts import FragmentReleased
from shared.messages.workers import Device, WorkerStatus
from shared.process.service import Health
from shared.run.versions import VersionIndex
from shared.store import ObjectStore
from tests import examples
from tests.scheduler.shell.live import RUN, Live, Trainer
from tests.waiting import until

NUM_WORKERS = 1024
LEFT = "worker_left"


def statuses() -> list[WorkerStatus]:
    return [
        examples.status(
            "rollout", "waiting_for_trainer", worker=f"r{number}", device=Device(concurrency=1)
        )
        for number in range(NUM_WORKERS)
    ]


async def report(url: str) -> None:
    """Send every worker's report once a second, spread over it, from a process of their own."""
    each = statuses()
    async with Bus.connect(url, run=RUN, name="workers") as bus:
        began = time.monotonic()
        for turn in range(10**6):
            for number, status in enumerate(each):
                await bus.send(status)
                if number % 32 == 31:
                    at = began + turn + number / len(each)
                    await asyncio.sleep(max(0.0, at - time.monotonic()))


def report_for_ever(url: str) -> None:
    asyncio.run(report(url))


def all_have(scheduler: Scheduler, batch: int) -> bool:
    """Whether every device generates a fragment of the batch and has one waiting."""
    hands = [[h.slot.batch for h in w.assigned] for w in scheduler.state.workers.values()]
    return all(hand == [batch, batch] for hand in hands)


async def return_fragments(bus: Bus, scheduler: Scheduler, newest: int) -> None:
    """What is of a version that is superseded, as devices do."""
    stale = [
        FragmentReleased(slot=held.slot, worker=worker.address, reason="stale")
        for worker in scheduler.state.workers.values()
        for held in worker.assigned
        if held.slot.batch < newest
    ]
    for first in range(0, len(stale), 64):
        await asyncio.gather(*(bus.publish(event) for event in stale[first : first + 64]))


@pytest.mark.broker
@pytest.mark.night
async def test_none_of_1024_living_workers_is_declared_dead_while_three_batches_open(
    nats_url: str, bus: Bus, index: VersionIndex, folder_store: ObjectStore
) -> None:
    process = get_context("spawn").Process(target=report_for_ever, args=(nats_url,), daemon=True)
    plan = examples.plan(num_groups=NUM_WORKERS // 2, group_size=16, fragment_size=4)
    scheduler = Scheduler(plan, bus, folder_store, index, Health())
    live = Live(Trainer(bus, folder_store), scheduler, index)
    with structlog.testing.capture_logs() as logs:
        async with live.running():
            await live.recovered()
            process.start()
            try:
                async with asyncio.timeout(60):
                    while len(scheduler.state.workers) < NUM_WORKERS:
                        assert process.is_alive(), "the workers' process has ended"
                        await asyncio.sleep(0.1)
                for version in range(3):
                    await live.trainer.commit(announce=True)
                    assert await live.knows(version)
                    await return_fragments(bus, scheduler, version)
                    await until(partial(all_have, scheduler, version), seconds=120)
                    await asyncio.sleep(6.0)  # longer than a lease
                found, _ = await bus.stored(subjects.TASK)
            finally:
                process.kill()
                process.join()
    assert [entry for entry in logs if entry["event"] == LEFT] == []
    assert len(scheduler.state.workers) == NUM_WORKERS
    assert len(found) == 3 * 2 * NUM_WORKERS, "each fragment is given to one device"
