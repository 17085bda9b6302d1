"""The scheduler's shell: carries events to the machine and its commands to the bus, and keeps the
version index, the metrics and device use up to date with the commit records."""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import structlog

from services.scheduler import limits
from services.scheduler.core.device_fragments import busy_addresses
from services.scheduler.core.exclusion import newly_excluded
from services.scheduler.core.inputs import MachineInput, RecoveryDone
from services.scheduler.core.machine import failure_to_send, step_together
from services.scheduler.core.recovery import RECOVERED_STREAMS, restart_batches
from services.scheduler.core.senders import is_foreign
from services.scheduler.core.state import Phase, Plan, State
from services.scheduler.core.throughput import forecast_batch
from services.scheduler.core.usage import UsageMeter, uses
from services.scheduler.shell.api_letters import Letters
from services.scheduler.shell.committed_views import device_hours
from services.scheduler.shell.dead_letters import DeadLetters, progress_of
from services.scheduler.shell.disk_watch import DiskWatch
from services.scheduler.shell.garbage_collection import gc_when_idle
from services.scheduler.shell.goal import Goal
from services.scheduler.shell.housekeeping import (
    BatchCleanup,
    ChainUpkeep,
    StreamsLost,
    StreamWatch,
    VersionCleanup,
    check_streams,
    read_kept_chain,
    retry,
)
from services.scheduler.shell.inbox import Inbox, follow, tick
from services.scheduler.shell.lease import Lease
from services.scheduler.shell.message_bursts import message_bursts
from services.scheduler.shell.metrics import PublishLag, batch_usage, measure_commit
from services.scheduler.shell.roster import Roster
from services.scheduler.shell.run_alarms import RunAlarms
from services.scheduler.shell.run_log import RunLog
from services.scheduler.sim.staleness import StalenessDecision
from shared.bus.bus import Bus
from shared.bus.reader import ReceivedMessage
from shared.cancellation import cancellable
from shared.errors import IntegrityError, SlotPoisoned
from shared.messages import subjects
from shared.messages.contracts import (
    Command,
    Event,
    FragmentGenerated,
    GenerateFragment,
    OperatorRequest,
    PolicyPublished,
    SetDevice,
    TrainGroup,
)
from shared.messages.fluid import FluidCommand, Stepped
from shared.process.failpoints import reach
from shared.process.service import Health
from shared.run.chain import Chain
from shared.run.commits import CommitRecord, StoredRecord, read_stored
from shared.run.layout import timeline_key, usage_key
from shared.run.log import Log
from shared.run.previews import PreviewRule
from shared.run.retention import Retention
from shared.run.versions import Version, VersionIndex
from shared.store import ObjectStore
from shared.telemetry import ANNOUNCEMENTS_REFUSED, FRAGMENTS

CATCH_UP_EVENTS = (PolicyPublished, OperatorRequest, RecoveryDone, Stepped)
"""Events that may give every device something to do, or are about all that the run has done. They
are handled in a thread, while statuses are heard."""
RestoredMessage = Event | GenerateFragment | TrainGroup | FluidCommand
"""Stored messages that define the state of the run."""
FOLLOWED_STREAMS = (subjects.TRAJ, subjects.REW, subjects.FLUID, subjects.EVT)

REPEATED_REQUESTS: dict[Phase, Literal["pause", "stop"]] = {"paused": "pause", "stopped": "stop"}
"""Requests of an operator that are repeated when the streams were lost."""

log = structlog.get_logger()


@dataclass(slots=True)
class Scheduler:
    plan: Plan
    bus: Bus
    store: ObjectStore
    index: VersionIndex
    health: Health
    state: State = field(default_factory=lambda: State(recovering=True))
    retention: Retention = field(default_factory=Retention)
    previews: PreviewRule = field(default_factory=PreviewRule)
    goal: Goal | None = None
    staleness: StalenessDecision | None = None
    """Relative number of steps that staleness may cost, and why; None before a decision."""
    stream_needs: Mapping[str, int] = field(default_factory=dict)
    """Bytes that a stream must take, by its name; without it a full one is waited for."""
    lease: Lease | None = None
    """The lease by which it commands; None if no other scheduler can be there."""
    chain: Chain = field(init=False)
    meter: UsageMeter = field(default_factory=UsageMeter)
    committed_at: list[float] = field(default_factory=list)
    """Monotonic times of the newest commits that this process has seen, in seconds."""
    alarms: RunAlarms = field(default_factory=RunAlarms)
    roster: Roster = field(init=False)
    dead_letters: DeadLetters = field(init=False)
    run_log: RunLog = field(init=False)
    _inbox: Inbox = field(default_factory=Inbox)
    _publish_lag: PublishLag = field(default_factory=PublishLag)
    _cleanup: BatchCleanup = field(init=False)
    _first: State = field(init=False)
    _next: State = field(init=False)
    """The state once the commands that are being sent are; some of them may have arrived."""
    _statuses_waiting: Callable[[], int] = lambda: 0
    _upkeep: ChainUpkeep = field(init=False)

    def __post_init__(self) -> None:
        self._first = self._next = self.state
        self.chain = Chain(self.store, self.bus.run)
        self._cleanup = BatchCleanup(self.bus, self.store, self.previews)
        self._upkeep = ChainUpkeep(self.store, self.bus.run, lambda: self.chain)
        letters = Letters(lambda: progress_of(self.state, self.chain.version))
        self.run_log = RunLog(Log.of_run(self.store, self.bus.run), letters)
        self._begin()

    def _begin(self) -> None:
        self.roster = Roster(
            self.bus, self._inbox.put, lambda: self.state, self.meter,
            num_waiting=lambda: self._statuses_waiting(),
        )  # fmt: skip
        self.dead_letters = DeadLetters(self.bus, self.run_log, self._inbox.put)

    async def run(self) -> None:
        """Recover from the commit records, then handle events; start over, with new streams, if
        streams are lost."""
        self._statuses_waiting = await self.bus.on_status(lambda status: self.roster.record(status))
        before: State | None = None
        while True:
            try:
                # In a task of its own, which a group of tasks that ends may cancel.
                await cancellable(asyncio.create_task(self._run_on(before)))
            except* StreamsLost as lost:
                log.error("streams_lost", lost=[str(error) for error in lost.exceptions])
            self.health.is_not_ready("recovering: messages of NATS were lost")
            before = self._start_over(before)

    async def _run_on(self, before: State | None) -> None:
        """Recover and handle events; ``before``: the state when streams were lost.

        Raises:
            StreamsLost: in a group.
        """
        if before is not None:
            await self._forget_open_batches()
        stream_states = await retry(self.bus.stream_states)
        await retry(self._make_streams)
        states = await retry(self.bus.stream_states)
        room = DiskWatch(self.store, self.index, self.bus.run)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stream_watch(room).run(states))
            tasks.create_task(room.run())
            last = await self._recover(before)
            check_streams({} if before else stream_states)
            for stream in FOLLOWED_STREAMS:
                after = last[stream.name]
                tasks.create_task(follow(self.bus, stream, self._inbox, self._note, after=after))
            if self.goal is not None and self.state.goal_reached_by is None:
                tasks.create_task(self.goal.watch(self._inbox.put))
            for work in (
                self.run_log.write(), self.dead_letters.follow(), self.roster.watch(),
                self._cleanup.run(self.chain.newest),
                self._upkeep.store_segments(), self._upkeep.copy_records(),
                self._version_cleanup().look_for_ever(), tick(self._inbox),
                gc_when_idle(lambda: self._inbox.is_empty), self._handle(),
            ):  # fmt: skip
                tasks.create_task(work)

    def _stream_watch(self, room: DiskWatch) -> StreamWatch:
        return StreamWatch(
            self.bus, self.health, lambda: self._cleanup.make_room(self.chain.version),
            lambda: 0.0 if self.lease is None else self.lease.seconds_unrenewed,
            self.run_log.alarm, lambda: room.reasons,
            lambda: self.alarms.look(
                self.plan, self.state, [each.status for each in self.roster.statuses.values()],
                self.chain.recent, time.monotonic(),
            ),
        )  # fmt: skip

    def _version_cleanup(self) -> VersionCleanup:
        return VersionCleanup(
            self.store, self.bus.run, self.retention, lambda: self.chain.wanted,
            self.roster.versions_in_use, lambda versions: self.chain.forget(versions),
        )  # fmt: skip

    async def _make_streams(self) -> None:
        """Make the streams, and begin this scheduler's epoch in them: both again if either fails,
        since they may be lost in between."""
        await self.bus.ensure_streams(self.stream_needs)
        if self.lease is not None:
            await self.bus.begin_epoch(self.lease.epoch)

    async def _recover(self, before: State | None) -> dict[str, int]:
        """Read what is stored; returns the number of the last message read, by stream."""
        self.chain = await self._read_chain()
        await retry(lambda: self.index.rebuild(self.chain.recent))
        if self.goal is not None and (reason := await self.goal.look()) is not None:
            await self._apply(reason)
        if self.chain.newest is not None:
            await self._apply(self.chain.newest.announcement())
            measure_commit(self.chain.newest)
        last = await self._read_back()
        if before is not None:
            self.state = restart_batches(self.state, before)
        await self._apply(RecoveryDone(self.bus.epoch))
        self.roster.leases.expect(busy_addresses(self.state), time.monotonic())
        if before is not None and before.phase in REPEATED_REQUESTS:
            request = OperatorRequest(action=REPEATED_REQUESTS[before.phase], id=uuid.uuid4().hex)
            await self.bus.publish(request)
        self.health.is_ready()
        return last

    async def _read_chain(self) -> Chain:
        return await retry(partial(read_kept_chain, self.store, self.bus.run))

    async def _forget_open_batches(self) -> None:
        """Delete the rest of them: it may be incomplete. This comes before lost streams are made,
        so that another scheduler sees that some are missing, or finds nothing."""
        self.chain = await self._read_chain()
        await self._confirm()
        for batch in (self.chain.version, self.chain.version + 1):
            await retry(partial(self.bus.forget_batch, max(0, batch)))

    def _start_over(self, before: State | None) -> State:
        """Forget what follows from the streams; returns the state so far, ``before`` if streams
        were lost again until it was restored."""
        if before is None or not self._next.recovering:
            before = self._next
        self.state = self._next = self._first
        self._inbox = Inbox()
        self._begin()
        return before

    async def _read_back(self) -> dict[str, int]:
        """Apply all that is stored, one stream after the other; return the number of the last
        message read, by stream."""
        # Read at once: behind the marks of this epoch there is no command of another one, so that
        # each result that is read finds its command, whichever of them is read first.
        contents = await asyncio.gather(*map(self.bus.stored, RECOVERED_STREAMS))
        for messages, _ in contents:
            await self._replay(messages)
        events = (each.message for messages, _ in contents for each in messages)
        policies = {each.policy for each in events if isinstance(each, PolicyPublished)}
        if (newest := self.chain.newest) is not None and newest.policy not in policies:
            await self.bus.publish(newest.announcement())  # it was lost, and members wait for it
        return {
            each.name: number for each, (_, number) in zip(RECOVERED_STREAMS, contents, strict=True)
        }

    async def _replay(self, messages: Sequence[ReceivedMessage]) -> None:
        """Apply what is stored in a stream, after a restart."""
        began = time.monotonic()
        for received in messages:
            if time.monotonic() > began + limits.MAX_READING_S:
                await asyncio.sleep(0)  # statuses and probes are answered meanwhile
                began = time.monotonic()
            message = received.message
            if isinstance(message, PolicyPublished):
                self._inbox.put(message)  # one may have come since the chain was read
                continue
            if isinstance(message, RestoredMessage):
                self._note(message)
                await self._apply(message)

    def _note(self, message: object) -> None:
        """Keep the failure of an attempt; a report about another worker's work is only counted."""
        if not is_foreign(self._next, message):
            self.dead_letters.note(message)
            return
        FRAGMENTS.labels(stage="scheduler", outcome="refused").inc()
        log.error("result_refused", hint="its worker was not given this work", message=str(message))

    async def _handle(self) -> None:
        while True:
            events = await self._inbox.get()
            if isinstance(events[0], PolicyPublished):
                await self._record(events[0])
            else:
                await self._apply(*events)
            for event in events:
                if isinstance(event, FragmentGenerated):
                    self._publish_lag.observe(event, self.state.policy, time.monotonic())
            await asyncio.sleep(0)  # statuses are heard between two events

    async def _apply(self, *events: MachineInput) -> None:
        """Apply an event, or several that came together."""
        now, first = time.monotonic(), events[0]
        self._meter(now, is_exact=isinstance(first, PolicyPublished))
        state, commands = (
            await asyncio.to_thread(step_together, self.plan, self.state, events, now)
            if any(isinstance(event, CATCH_UP_EVENTS) for event in events)
            else step_together(self.plan, self.state, events, now)
        )
        self._next = state
        # Concurrently: each has its own subject, and fifty one after another take 40 ms.
        for wave in message_bursts(commands):
            await asyncio.gather(*map(self._send, wave))
        if state.phase != self.state.phase:
            log.info("phase", phase=state.phase, failure=state.failure)
        for worker in newly_excluded(self.state, state, first):
            log.warning("worker_not_asked", name=worker.name, reason=worker.excluded)
        self.state = state  # last: events whose commands could not be sent are as if never seen
        if not state.recovering:
            self.run_log.change_phase(state.phase, state.failure)

    def _meter(self, now: float, *, is_exact: bool) -> None:
        """Add up what devices do; of many, not at every event."""
        since = self.meter.since
        if (
            is_exact
            or since is None
            or now - since >= limits.USAGE_CHECK_S * len(self.state.workers)
        ):
            self.meter.advance(now, uses(self.plan, self.state))

    async def _confirm(self) -> None:
        """Return when it is sure that this scheduler commands."""
        if self.lease is not None:
            await self.lease.confirm()

    async def _send(self, command: Command) -> None:
        await self._confirm()
        try:
            await self.bus.publish(command)
        except SlotPoisoned as error:
            assert not isinstance(command, SetDevice)  # it has no slot
            self._inbox.put(failure_to_send(command, str(error)))

    async def _record(self, event: PolicyPublished) -> None:
        """A version is announced: check its commit record, open its batch, index it."""
        while self.chain.version < event.policy.version:  # one before it may have been missed
            number = self.chain.version + 1
            stored = await retry(partial(read_stored, self.store, self.bus.run, number))
            is_last = number == event.policy.version
            if stored is None or (is_last and stored.record.policy != event.policy):
                ANNOUNCEMENTS_REFUSED.inc()
                log.error("announcement_without_commit", version=event.policy.version)
                self.dead_letters.refuse(event, "there is no such commit record")
                return
            await self._extend(stored, event if is_last else stored.record.announcement())

    async def _extend(self, stored: StoredRecord, event: PolicyPublished) -> None:
        record, step = stored.record, self.chain.add(stored)
        self.committed_at = [*self.committed_at, time.monotonic()][-limits.MAX_KEPT_COMMITS :]
        self._publish_lag.publish(record.policy, time.monotonic() - event.seconds)
        await self._apply(event)
        # Indexed after the batch is opened: devices wait for that, and can find the record.
        reach("scheduler.before-index")
        await retry(partial(self._index, record))
        reach("scheduler.after-index")
        measure_commit(record)
        self._upkeep.committed(step)
        await self._keep_usage(record)
        self._cleanup.committed(record)

    async def _index(self, record: CommitRecord) -> None:
        try:
            await self.index.publish(Version(policy=record.policy, weights=record.weights))
        except IntegrityError as error:  # Redis has lost what it had
            log.warning("version_index_rebuilt", reason=str(error))
            await self.index.rebuild(self.chain.recent)

    async def _keep_usage(self, record: CommitRecord) -> None:
        """Store the devices' use of time in the batch that was just committed, for the report."""
        timeline, devices = self.meter.timeline(record.batch or 0), self.meter.take()
        if record.batch is None or len(self.committed_at) < 2:
            return  # this process has not seen it from its beginning
        tag = next((each for each in self.state.tag.history if each.batch == record.batch), None)
        seconds = self.committed_at[-1] - self.committed_at[-2]
        forecast = await asyncio.to_thread(forecast_batch, self.plan, self.state)
        workers = [last.status for last in self.roster.statuses.values()]
        hours = await retry(partial(device_hours, self.store, self.bus.run, record.batch))
        usage = batch_usage(record, seconds, devices, tag, forecast, workers, hours)
        timeline = timeline.model_copy(update={"ended_at": time.time()})
        kept = {
            usage_key(self.bus.run, usage.batch): usage.model_dump_json(indent=1).encode(),
            timeline_key(self.bus.run, usage.batch): await asyncio.to_thread(timeline.encode),
        }
        await asyncio.gather(*(retry(partial(self.store.create, *each)) for each in kept.items()))
