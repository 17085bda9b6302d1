"""Reports what a worker is doing, once a second and at changes."""

import asyncio
import contextlib
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from shared.bus.bus import Bus
from shared.errors import Unavailable, UserError
from shared.limits import STATUS_S, WORKER_RETRY_S
from shared.messages.records import HOME
from shared.messages.workers import (
    Activity,
    Device,
    DeviceLoan,
    Holds,
    MemoryShortage,
    Service,
    Transferred,
    WorkerRefused,
    WorkerStatus,
)
from shared.process.gpu_use import nvml, read_gpu_use
from shared.process.libraries import versions
from shared.process.watchdog import WARNING_SHARE, WorkInProgress
from shared.store import ObjectStore
from shared.store.traffic import Meter, Traffic
from shared.telemetry import QUARANTINED

ON_DEVICE: frozenset[Activity] = frozenset(
    {"generating", "encoding", "scoring", "training", "loading_weights"}
)
"""Activities that end unless a device, or a scorer, hangs."""

T = TypeVar("T")

log = structlog.get_logger()


def new_address(name: str) -> str:
    """Return the address of this start of the worker: what was sent to an earlier one never reaches
    it."""
    return f"{name[:55]}-{uuid.uuid4().hex[:8]}"


def host_memory() -> int:
    """Return the bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(slots=True)
class Worker:
    """The status of this process; `doing` marks what it is busy with."""

    service: Service
    name: str
    idle: Activity
    """The reason for waiting when it is not busy."""
    device: Device = field(default_factory=Device)
    address: str = ""
    host: str = field(default_factory=socket.gethostname)
    site: str = HOME
    url: str = ""
    """Address of its probes, once they are served."""
    policy_version: int | None = None
    loan: DeviceLoan | None = None
    memory_shortage: MemoryShortage | None = None
    holds: Holds | None = None
    """State from which a fluid device could take the next step."""
    staged: int | None = None
    """Newest version of which a device that only generates has the weights."""
    traffic: Traffic = field(default_factory=Traffic)
    """Objects that this process has stored and read."""
    num_done: int = 0
    busy_seconds: float = 0.0
    seconds: dict[Activity, float] = field(default_factory=dict)
    progress: WorkInProgress = field(default_factory=WorkInProgress)
    """Activities of its devices, for the watchdog."""
    remark: str = ""
    """Difference of this device from others, in words; shown while nothing is missing."""
    _refused: str | None = None
    """Reason why the scheduler does not let it take part."""
    _activity: Activity = "starting"
    _says: str = ""
    """Additional activity, in words."""
    _doing: list[Activity] = field(default_factory=list)
    _lacks: "list[tuple[Activity, str]]" = field(default_factory=list)
    """Reasons for waiting in place of `idle`, each with a note."""
    _since: float = field(default_factory=lambda: time.monotonic())
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.address = self.address or new_address(self.name)

    @property
    def activity(self) -> Activity:
        return self._activity

    @activity.setter
    def activity(self, activity: Activity) -> None:
        now = time.monotonic()
        self.seconds[self._activity] = self.seconds.get(self._activity, 0.0) + now - self._since
        self._activity, self._since = activity, now

    @contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        """Count the time of an activity. If there are several, the one that began last is shown."""
        began = time.monotonic()
        self._doing.append(activity)
        self.activity = activity
        try:
            with (
                self.progress.running(activity)
                if activity in ON_DEVICE
                else contextlib.nullcontext()
            ):
                yield
        finally:
            self._doing.remove(activity)
            self.activity = self._doing[-1] if self._doing else self._waits_for
            self.busy_seconds += time.monotonic() - began

    @contextmanager
    def lacking(self, activity: Activity, note: str) -> Iterator[None]:
        """Show ``activity``, with a note in words, while this worker is not busy with anything. If
        several things are missing, the first is shown."""
        lack = (activity, note)
        self._lacks.append(lack)
        self.rest()
        try:
            yield
        finally:
            self._lacks.remove(lack)
            self.rest()

    @contextmanager
    def saying(self, note: str) -> Iterator[None]:
        """Show a note inside of this block, for any activity."""
        self._says = note
        self.report_now()
        try:
            yield
        finally:
            self._says = ""

    def rest(self) -> None:
        """Show what this worker lacks or waits for, unless it is busy."""
        if not self._doing:
            self.activity = self._waits_for

    @property
    def _lack(self) -> str:
        """Missing inputs, in words, while it is not busy."""
        return "" if self._doing or not self._lacks else self._lacks[0][1]

    @property
    def _waits_for(self) -> Activity:
        return self._lacks[0][0] if self._lacks else self.idle

    def note_shortage(self, shortage: MemoryShortage | None) -> None:
        """Report a shortage of memory, if there was one, and log it."""
        if shortage is None:
            return
        before = self.memory_shortage
        count = shortage.count if before is None else before.count + shortage.count
        self.memory_shortage = shortage.model_copy(update={"count": count})
        log.warning("out_of_memory", **shortage.model_dump(exclude={"count"}), count=count)
        self.report_now()

    def report_now(self) -> None:
        """Report at once, because something has changed that the scheduler should know."""
        self._changed.set()

    async def report(self, bus: Bus) -> None:
        """Send the status to the scheduler, without end.

        Raises:
            UserError: if the scheduler does not let this worker take part.
        """
        await bus.on_refusal(self.address, self._note_refusal)
        while self._refused is None:
            self._changed.clear()
            await bus.send(self._status())
            # Not wait_for: in Python 3.11 it loses a cancellation that comes with its result.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_S):
                    await self._changed.wait()
        raise UserError(self._refused)

    async def _note_refusal(self, refusal: WorkerRefused) -> None:
        self._refused = refusal.reason
        self.report_now()

    def _status(self) -> WorkerStatus:
        self.activity = self.activity  # adds up its seconds
        return WorkerStatus(
            service=self.service,
            worker=self.name,
            address=self.address,
            activity=self.activity,
            policy_version=self.policy_version,
            num_done=self.num_done,
            num_quarantined=_num_quarantined(),
            busy_seconds=round(self.busy_seconds, 3),
            seconds={activity: round(spent, 3) for activity, spent in self.seconds.items()},
            device=self.device,
            loan=self.loan,
            memory_shortage=self.memory_shortage,
            holds=self.holds,
            staged=self.staged,
            sent=_transferred(self.traffic.up),
            received=_transferred(self.traffic.down),
            round_trip=self.traffic.round_trip,
            host=self.host,
            site=self.site,
            url=self.url,
            gpu_use=read_gpu_use(nvml(), self.device.gpu),
            versions=dict(versions()),
            note=self.progress.hangs(WARNING_SHARE) or self._says or self._lack or self.remark,
        )


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Holds what every part of a worker shares: the bus, the store, and the status it reports."""

    bus: Bus
    store: ObjectStore
    worker: Worker

    def __post_init__(self) -> None:
        self.worker.traffic = self.store.traffic


async def patiently(work: Callable[[], Awaitable[T]], event: str, **about: str) -> T:
    """Return the result of ``work``, over outages of the store and the bus, which are logged."""
    while True:
        try:
            return await work()
        except Unavailable as error:
            log.warning(event, **about, error=str(error))
            await asyncio.sleep(WORKER_RETRY_S)


def _transferred(meter: Meter) -> Transferred | None:
    if not meter.num_bytes:
        return None
    return Transferred(num_bytes=meter.num_bytes, seconds=round(meter.seconds, 6))


def _num_quarantined() -> int:
    return sum(
        int(sample.value)
        for metric in QUARANTINED.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    )
