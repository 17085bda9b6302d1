"""The scheduler's shell: carries events to the machine, its commands to the bus, and keeps the
version index, the metrics and the history up to date with the commit records."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import structlog
from redis.exceptions import RedisError

from services.scheduler.deaths import death_of
from services.scheduler.machine import Input, WorkerJoined, WorkerLeft, step
from services.scheduler.state import Plan, State
from shared import subjects
from shared.bus import Bus
from shared.commits import CommitRecord, commit_chain, read_commit
from shared.contracts import (
    Command,
    Event,
    FragmentFailed,
    GroupFailed,
    PolicyPublished,
    TrainGroup,
    WorkerStatus,
)
from shared.errors import SlotPoisoned, Unavailable
from shared.run_store import batch_folder
from shared.service import Health
from shared.store import ObjectStore
from shared.telemetry import DLQ_MESSAGES, ONPOLICY_RATIO_ERROR, REWARD_MEAN, STALENESS, STEP
from shared.versions import Version, VersionIndex

SILENCE_S = 5.0
"""A worker that has not reported for this long has left."""
KEPT_BATCHES = 2
"""Committed batches whose messages and trajectories are kept, for people to look at."""
RETRY_S = 0.5

T = TypeVar("T")

log = structlog.get_logger()


@dataclass(slots=True)
class Seen:
    status: WorkerStatus
    at: float
    """Monotonic seconds."""


@dataclass(slots=True)
class Scheduler:
    plan: Plan
    bus: Bus
    store: ObjectStore
    index: VersionIndex
    health: Health
    state: State = field(default_factory=State)
    chain: list[CommitRecord] = field(default_factory=list)
    seen: dict[str, Seen] = field(default_factory=dict)
    committed_at: list[float] = field(default_factory=list)
    """Monotonic seconds of the commits that this process has seen."""
    num_quarantined: int = 0
    _inbox: "asyncio.Queue[Input]" = field(default_factory=asyncio.Queue)
    _to_forget: "asyncio.Queue[int]" = field(default_factory=asyncio.Queue)

    async def run(self) -> None:
        """Recover from the commit records, then handle events for ever."""
        await self.bus.ensure_streams()
        self.chain = await _retry(lambda: commit_chain(self.store, self.bus.run))
        await _retry(lambda: self.index.rebuild(self.chain))
        if self.chain:
            await self._apply(_announcement(self.chain[-1]))
            self._measure(self.chain[-1])
        await self.bus.on_status(self._note_status)
        self.health.is_ready()
        async with asyncio.TaskGroup() as tasks:
            for stream in (subjects.TRAJ, subjects.REW, subjects.EVT):
                tasks.create_task(self._follow(stream))
            tasks.create_task(self._follow_deaths())
            tasks.create_task(self._watch_workers())
            tasks.create_task(self._forget_old())
            tasks.create_task(self._handle())

    async def _follow(self, stream: subjects.Stream) -> None:
        async for received in self.bus.follow(stream):
            if isinstance(received.message, Event):
                self._inbox.put_nowait(received.message)

    async def _follow_deaths(self) -> None:
        async for received in self.bus.follow(subjects.DLQ):
            if not received.subject.startswith("$JS"):
                self.num_quarantined += 1
                DLQ_MESSAGES.set(self.num_quarantined)
            died = await death_of(self.bus, received)
            if died is not None:
                self._inbox.put_nowait(died)

    async def _handle(self) -> None:
        while True:
            event = await self._inbox.get()
            if isinstance(event, PolicyPublished):
                await self._record(event)
            else:
                await self._apply(event)

    async def _apply(self, event: Input) -> None:
        state, commands = step(self.plan, self.state, event)
        for command in commands:
            await self._send(command)
        if state.phase != self.state.phase:
            log.info("phase", phase=state.phase, failure=state.failure)
        self.state = state  # last: an event whose commands could not be sent is as if never seen

    async def _send(self, command: Command) -> None:
        try:
            await self.bus.publish(command)
        except SlotPoisoned as error:
            self._inbox.put_nowait(_poisoned(command, str(error)))

    async def _record(self, event: PolicyPublished) -> None:
        """A version is announced: believe its commit record, index it, then open its batch."""
        number = event.policy.version
        if number < len(self.chain):
            return
        record = await _retry(lambda: read_commit(self.store, self.bus.run, number))
        if record is None or record.policy != event.policy or number != len(self.chain):
            log.error("announcement_without_commit", version=number)
            return
        version = Version(policy=record.policy, weights=record.weights)
        await _retry(lambda: self.index.publish(version))
        self.chain.append(record)
        self.committed_at.append(time.monotonic())
        self._measure(record)
        await self._apply(event)
        if number > KEPT_BATCHES:
            self._to_forget.put_nowait(number - 1 - KEPT_BATCHES)

    async def _forget_old(self) -> None:
        """Remove what no recovery needs, beside the handling of events."""
        while True:
            batch = await self._to_forget.get()
            folder = batch_folder(self.bus.run, batch)
            await _retry(partial(self.bus.forget_batch, batch))
            await _retry(partial(self.store.delete_folder, folder))

    def _measure(self, record: CommitRecord) -> None:
        STEP.set(record.policy.version)
        if record.batch is None:
            return
        REWARD_MEAN.set(record.metrics["reward_mean"])
        ONPOLICY_RATIO_ERROR.set(record.metrics["onpolicy_ratio_error"])
        for group in record.trained:
            staleness = record.batch - group.policy_version
            STALENESS.labels(steps=staleness).inc(len(group.rewards))

    async def _note_status(self, status: WorkerStatus) -> None:
        if status.worker not in self.seen:
            self._inbox.put_nowait(WorkerJoined(status.worker, status.service))
            log.info("worker_joined", name=status.worker, service=status.service)
        self.seen[status.worker] = Seen(status, time.monotonic())

    async def _watch_workers(self) -> None:
        while True:
            await asyncio.sleep(1)
            silent = time.monotonic() - SILENCE_S
            for name in [name for name, seen in self.seen.items() if seen.at < silent]:
                del self.seen[name]
                self._inbox.put_nowait(WorkerLeft(name))
                log.warning("worker_left", name=name)


def _announcement(record: CommitRecord) -> PolicyPublished:
    return PolicyPublished(policy=record.policy, weights=record.weights, worker=record.worker)


def _poisoned(command: Command, reason: str) -> FragmentFailed | GroupFailed:
    if isinstance(command, TrainGroup):
        return GroupFailed(
            batch=command.batch, group=command.group, attempt=command.attempt, reason=reason
        )
    return FragmentFailed(slot=command.fragment.slot, stage="delivery", reason=reason)


async def _retry(work: Callable[[], Awaitable[T]]) -> T:
    """The result of ``work``, over outages of the store, the index or the broker."""
    while True:
        try:
            return await work()
        except (Unavailable, RedisError, OSError) as error:
            log.warning("retrying", error=repr(error))
            await asyncio.sleep(RETRY_S)
