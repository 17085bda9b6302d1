"""The real scheduler with many workers: longest turn of its loop, and living workers given up.

Brokers, messages and scheduler are those of a run. The workers live in a process of their own: each
reports once a second and answers a task at once, so the scheduler is as busy as it can be.
"""

import asyncio
import contextlib
import multiprocessing
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from bench.growth.core import REF, plan_of, policy_of, published, results_of
from bench.growth.fluid_core import GROUP_SECONDS, checksum_of
from bench.growth.history import METRICS, resident_bytes
from bench.growth.turns import Turns
from bench.runner.session import open_session
from services.scheduler.core.fluid.cutting import group_share
from services.scheduler.core.state import Plan, first_state
from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.garbage_collection import settle_heap
from shared.bus.bus import Bus
from shared.messages import subjects
from shared.messages.contracts import GenerateFragment, Message
from shared.messages.fluid import (
    ExchangeSums,
    PieceTrained,
    Share,
    Stepped,
    SumHeld,
    TakeStep,
    TrainPiece,
)
from shared.messages.workers import Device, Holds, WorkerStatus
from shared.process.service import Health
from shared.process.settings import ServiceSettings
from shared.recipe.schedule import RunSchedule
from shared.run.commits import CommitRecord, commit, record_digest
from shared.run.versions import VersionIndex
from shared.store import ObjectStore, open_store

log = structlog.get_logger()
RUN = "bench"
IN_FLIGHT = 128
"""Messages that the workers send at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCosts:
    workers: int
    batches: int
    seconds: float
    """Seconds from the first batch's opening to the last one's commit."""
    left: int
    """Living workers that were given up."""
    turns: Turns
    """Turns of the scheduler's loop."""
    cpu_seconds: float
    """CPU seconds of the scheduler's process."""
    resident_bytes: tuple[int, int]
    """After the second batch, and in the end."""


def members_plan(members: int) -> Plan:
    """A batch with a group for each member, in two fragments."""
    return replace(
        plan_of(members, 2), num_groups=members, trained_steps=8,
        schedule=RunSchedule(mode="fluid", fragment_size=8, max_staleness=0),
    )  # fmt: skip


@dataclass(slots=True)
class Fleet:
    """All workers of the run, in one process."""

    bus: Bus
    store: ObjectStore
    num_workers: int
    head: CommitRecord | None = None
    version: int = 0
    shares: tuple[Share, ...] = ()
    plan: Plan = field(default_factory=lambda: members_plan(1))
    _free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(IN_FLIGHT))
    _sending: set["asyncio.Task[None]"] = field(default_factory=set)

    @property
    def names(self) -> list[str]:
        return [f"m{number}" for number in range(self.num_workers)]

    async def run(self) -> None:
        self.plan = members_plan(self.num_workers)
        await self.commit()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.report())
            tasks.create_task(self.answer(subjects.TASK))
            tasks.create_task(self.answer(subjects.FLUID))

    def statuses(self) -> list[WorkerStatus]:
        checksum = checksum_of(self.version)
        holds = Holds(version=self.version, checksum=checksum, update=0, sum_bytes=0)
        return [
            WorkerStatus(
                service="trainer", worker=name, address=f"{name}-0", activity="generating",
                device=Device(concurrency=1), policy_version=self.version, holds=holds,
            )
            for name in self.names
        ]  # fmt: skip

    async def answer(self, stream: subjects.Stream) -> None:
        async for received in self.bus.follow(stream):
            match received.message:
                case GenerateFragment() as command:
                    for result in results_of(command):
                        await self.send(result)
                case TrainPiece() as command:
                    seconds = GROUP_SECONDS * group_share(self.plan, command.piece)
                    await self.send(PieceTrained(
                        **command.answer_fields, seconds=seconds, pass_rows=0,
                    ))  # fmt: skip
                case ExchangeSums() as command:
                    self.shares = command.shares
                    for share in command.shares:
                        await self.send(SumHeld(
                            **command.answer_fields, worker=share.worker,
                            sum_id=f"{command.batch:064x}", norm=1.0, finite=True, scale=1.0,
                            seconds=0.0,
                        ))  # fmt: skip
                case TakeStep() as command:
                    await self.step(command)
                case _:
                    pass

    async def step(self, command: TakeStep) -> None:
        """Have all members step, and the committer commit."""
        self.version = command.batch + 1
        for share in self.shares:
            await self.send(Stepped(
                **command.answer_fields, worker=share.worker, policy=policy_of(self.version),
                checksum=checksum_of(self.version),
                is_reference=share.worker == command.committer, seconds=0.0,
            ))  # fmt: skip
        await self.commit()

    async def commit(self) -> None:
        parent = None if self.head is None else record_digest(self.head.encode())
        self.head = CommitRecord(
            run=RUN, policy=policy_of(self.version), parent=parent, weights=REF, checkpoint=REF,
            metrics=METRICS if self.version else {}, worker="m0-0",
            checksum=checksum_of(self.version), shares=self.shares,
        )  # fmt: skip
        await commit(self.store, self.head)
        event = published(self.version).model_copy(update={"checksum": checksum_of(self.version)})
        await self.bus.publish(event)

    async def report(self) -> None:
        """Each once a second, spread over it."""
        began = time.monotonic()
        for turn in range(10**6):
            each = self.statuses()
            for number, one in enumerate(each):
                await self.bus.send(one)
                if number % 32 == 31:
                    at = began + turn + number / len(each)
                    await asyncio.sleep(max(0.0, at - time.monotonic()))

    async def send(self, message: Message) -> None:
        """Send a message beside others."""
        await self._free.acquire()
        task = asyncio.create_task(self._send(message))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, message: Message) -> None:
        try:
            await self.bus.publish(message)
        finally:
            self._free.release()


def fleet(settings: ServiceSettings, num_workers: int) -> None:
    async def run() -> None:
        async with settings.connect_bus() as bus:
            await bus.wait_for_streams()
            await Fleet(bus, open_store(settings.store), num_workers).run()

    asyncio.run(run())


async def measure(folder: Path, num_workers: int, batches: int) -> LiveCosts:
    """Run the scheduler with `num_workers` members until `batches` are committed."""
    plan = members_plan(num_workers)
    objects = folder / "objects"
    objects.mkdir(parents=True)
    async with open_session(folder, folder / "data", objects=objects) as session:
        settings = session.settings(RUN)
        async with settings.connect_bus() as bus, settings.connect_index() as index:
            scheduler = Scheduler(
                plan, bus, open_store(settings.store), index, Health(), state=first_state(plan)
            )
            process = multiprocessing.get_context("spawn").Process(
                target=fleet, args=(settings, num_workers), daemon=True
            )
            process.start()
            try:
                return await _watch(scheduler, index, num_workers, batches)
            finally:
                process.kill()
                process.join()


async def _watch(
    scheduler: Scheduler, index: VersionIndex, num_workers: int, batches: int
) -> LiveCosts:
    turns, left = Turns(), set[str]()
    settle_heap()
    task = asyncio.create_task(scheduler.run())
    began, cpu, early, version = 0.0, 0.0, 0, 0
    with turns.timed():
        while scheduler.chain.version < batches and not task.done():
            await asyncio.sleep(0.1)
            if scheduler.chain.version > version:
                version = scheduler.chain.version
                log.info("committed", version=version, of=batches, given_up=len(left))
            if len(scheduler.roster.statuses) >= num_workers and not began:
                began, cpu = time.monotonic(), time.process_time()
                everybody = set(scheduler.roster.statuses)
            if began:
                left |= everybody - set(scheduler.roster.statuses)
            if scheduler.chain.version == 2 and not early:
                early = resident_bytes()
    seconds, used = time.monotonic() - began, time.process_time() - cpu
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return LiveCosts(
        workers=num_workers, batches=batches, seconds=seconds, left=len(left),
        turns=turns, cpu_seconds=used,
        resident_bytes=(early, resident_bytes()),
    )  # fmt: skip
