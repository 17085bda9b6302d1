"""The lease of a run's schedulers: one commands, the others stand by.

The lease is an entry of a register (`shared.bus.register`) that leaves it after `LEASE_TTL_S`. Its
holder renews it once a second in the loop in which it also works, so that a loop that hangs loses
it. A scheduler that cannot reach the broker retries, and continues if no other took the lease: its
next entry follows its last one. A scheduler that ends releases the lease; if the holder's
process on the same host is gone, others do not wait for the entry to expire.

A scheduler that takes the lease begins a new epoch (`shared.messages.epochs`). The epoch voids the
commands of all others; the lease only ensures that one scheduler commands. Each epoch of a run is
an object, made by exclusive create: no two schedulers have one epoch, and no epoch is reused, even
if the broker loses its data.
"""

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from pydantic import ValidationError

from services.scheduler import limits
from services.scheduler.shell.disk_watch import REMEDIES, STORE
from services.scheduler.shell.housekeeping import STORES_NOTHING, retry
from shared.bus.bus import Bus
from shared.bus.register import Register, RegisterEntry
from shared.errors import LeaseLost, Unavailable
from shared.messages.epochs import EpochRecord, HeldLease, next_epoch
from shared.messages.records import Record, Text, Token
from shared.process.service import Health
from shared.run.layout import epoch_key, numbers_in
from shared.store import ObjectStore
from shared.telemetry import ALARM, LEADER, LEASE_EPOCH

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_KEPT_EPOCHS = 64
"""Newest epochs whose objects are kept."""

log = structlog.get_logger()


class ProcessRecord(Record):
    """Names a process of one host, as others of that host see it."""

    boot: Text
    """The host's boot id; empty on systems without one."""
    namespace: Text
    """Namespace of its process ids."""
    pid: int
    started: Text
    """When it was started, in the kernel's count."""

    @classmethod
    def this(cls) -> "ProcessRecord":
        pid = os.getpid()
        return cls(boot=_boot(), namespace=_namespace(), pid=pid, started=_started(pid))

    @property
    def is_gone(self) -> bool:
        """Whether this process can prove that the other one has ended."""
        return self.is_here and _started(self.pid) != self.started

    @property
    def is_here(self) -> bool:
        return bool(self.boot) and (self.boot, self.namespace) == (_boot(), _namespace())


class LeaseRecord(Record):
    """Is what the register holds."""

    scheduler: Token
    """Name of the holder's start, made up for it."""
    url: Text = ""
    """Address of its API."""
    process: ProcessRecord
    released: bool = False
    """Whether the holder has given it back."""


def _boot() -> str:
    return _read("/proc/sys/kernel/random/boot_id")


def _namespace() -> str:
    with suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


def _started(pid: int) -> str:
    """Return the start time of a process; empty if it is gone or a zombie."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


@dataclass(slots=True)
class Lease:
    """Is waited for, kept, and given back by one scheduler."""

    bus: Bus
    store: ObjectStore
    health: Health
    url: str = ""
    clock: Callable[[], float] = lambda: time.monotonic()
    holder: str = ""
    """Address of the API of the scheduler that holds it; empty where this host cannot reach it."""
    _held: HeldLease | None = None
    _renewed_at: float = 0.0
    _has_missed: bool = False
    """Whether the newest attempt to renew it was not answered."""
    _last_seen: tuple[int, float] = (0, 0.0)
    """Number of another's entry, and since when it is the newest one."""
    _unwritten_since: float | None = None
    """When the broker first did not store an entry though it could be read; None if it does."""
    _renewed: asyncio.Event = field(default_factory=asyncio.Event)
    _register: Register = field(init=False)
    _mine: LeaseRecord = field(init=False)

    def __post_init__(self) -> None:
        self._register = Register(
            self.bus.jetstream, f"DG_LEASE_{self.bus.run}", limits.LEASE_TTL_S
        )
        name = f"scheduler-{uuid.uuid4().hex[:12]}"
        self._mine = LeaseRecord(scheduler=name, url=self.url, process=ProcessRecord.this())

    @property
    def epoch(self) -> int:
        """The epoch in which this scheduler commands."""
        assert self._held is not None
        return self._held.epoch

    @asynccontextmanager
    async def held(self) -> AsyncIterator["Lease"]:
        """Wait for the lease, and give it back at the end of the block."""
        LEADER.set(0)
        await self._take()
        try:
            yield self
        finally:
            LEADER.set(0)
            await self._release()

    async def keep(self) -> None:
        """Renew the lease without end.

        Raises:
            LeaseLost: if another scheduler has taken it, or may have.
        """
        while True:
            renewed = await self._renew()
            await asyncio.sleep(limits.LEASE_RENEW_S if renewed else limits.LEASE_RETRY_S)

    async def confirm(self) -> None:
        """Return once it is certain, by this process's clock, that no other scheduler has the
        lease."""
        while self.clock() - self._renewed_at > limits.RENEWED_WITHIN_S:
            self._renewed.clear()
            await self._renewed.wait()

    @property
    def seconds_unrenewed(self) -> float:
        """Seconds by which the newest renewal is late."""
        return max(0.0, self.clock() - self._renewed_at - limits.LEASE_RENEW_S)

    async def _take(self) -> None:
        """Take the lease as soon as it is free, and begin an epoch."""
        await retry(self._register.create)
        ask_from = 0.0
        while True:
            began = self.clock()
            try:
                revision = await self._ask() if began >= ask_from else None
            except Unavailable as error:
                self._stand_by(STORES_NOTHING if self._stores_nothing else f"standby: {error}")
                ask_from, revision = self.clock() + limits.HOLDER_HEAD_START_S, None
                self._last_seen = (0, 0.0)
            if revision is not None and await self._begin(revision, began):
                return
            await asyncio.sleep(limits.LEASE_RETRY_S)

    async def _ask(self) -> int | None:
        """Return the number of this scheduler's entry if the lease was free."""
        unwritten, self._unwritten_since = self._unwritten_since, None
        entry = await self._register.read()
        record = None if entry is None else _decoded(entry)
        if entry is not None and record is not None and not self._is_free(entry, record):
            is_loopback = urlsplit(record.url).hostname in LOOPBACK
            self.holder = record.url if record.process.is_here or not is_loopback else ""
            self._stand_by(f"standby: the scheduler at {record.url or record.scheduler} commands")
            return None
        self._unwritten_since = self.clock() if unwritten is None else unwritten
        revision = await self._write(on=0 if entry is None else entry.revision)
        self._unwritten_since = None
        return revision

    def _is_free(self, entry: RegisterEntry, record: LeaseRecord) -> bool:
        revision, since = self._last_seen
        if entry.revision != revision:
            since = self.clock()
        self._last_seen = entry.revision, since
        is_unrenewed = self.clock() - since > limits.ABANDONED_S
        return is_unrenewed or _is_free(record)

    @property
    def _stores_nothing(self) -> bool:
        """Whether the broker responds and stores nothing for so long that an operator has to act:
        no commanding scheduler exists that could report it."""
        since = self._unwritten_since
        full = since is not None and self.clock() - since > limits.NATS_ALARM_DELAY_S
        ALARM.labels(what="nats_stores_nothing").set(full)
        return full

    async def _begin(self, revision: int, began: float) -> bool:
        """Begin an epoch with this entry; False if the lease was lost meanwhile."""
        epoch = await self._new_epoch(revision)
        self._held, self._renewed_at = HeldLease(epoch, revision), began
        if (
            self.clock() - began > limits.RENEWED_WITHIN_S
        ):  # it took long: somebody else may have the lease
            try:
                await self._renew()
            except LeaseLost:
                self._held = None
                return False
        self.holder = self.url
        LEADER.set(1)
        LEASE_EPOCH.set(epoch)
        log.info("lease_taken", epoch=epoch, scheduler=self._mine.scheduler)
        return True

    async def _renew(self) -> bool:
        """Write the next entry; False if the broker does not answer. Raises LeaseLost."""
        assert self._held is not None
        began = self.clock()
        try:
            on = self._held.revision
            revision = None if self._has_missed else await self._write(on=on)
            if revision is None:  # it has left the register, or an answer was lost
                revision = await self._rewrite()
            lease = await self._next(revision)
        except Unavailable as error:
            log.warning("lease_not_renewed", error=str(error))
            self._has_missed = True
            return False
        if lease is None:
            log.error("lease_lost", epoch=self._held.epoch, holder=self.holder)
            raise LeaseLost("another scheduler commands")
        self._held, self._renewed_at, self._has_missed = lease, began, False
        self._renewed.set()
        return True

    async def _new_epoch(self, revision: int) -> int:
        """Make a new epoch, retrying over outages of the store; report it if that takes long, since
        no scheduler commands that could."""
        store, run, name = self.store, self.bus.run, self._mine.scheduler
        claiming = asyncio.create_task(retry(lambda: claim_epoch(store, run, revision, name)))
        alarm = ALARM.labels(what=STORE)
        try:
            await asyncio.wait({claiming}, timeout=limits.NATS_ALARM_DELAY_S)
            if not claiming.done():
                alarm.set(1)
                self._stand_by(
                    REMEDIES[STORE].format(f"no new epoch for {limits.NATS_ALARM_DELAY_S:.0f} s")
                )
            return await claiming
        finally:
            alarm.set(0)
            claiming.cancel()

    async def _rewrite(self) -> int | None:
        """Write an entry on top of what the register has, unless that is another's."""
        entry = await self._register.read()
        if entry is not None and not self._is_mine(entry):
            record = _decoded(entry)
            self.holder = "" if record is None else record.url
            return None
        return await self._write(on=0 if entry is None else entry.revision)

    def _is_mine(self, entry: RegisterEntry) -> bool:
        """Whether this scheduler wrote an entry. The number alone proves nothing: a rebuilt
        register may have another scheduler's entry at the same number."""
        record = _decoded(entry)
        return record is not None and record.scheduler == self._mine.scheduler

    async def _next(self, revision: int | None) -> HeldLease | None:
        """Return the lease after this entry; None if it belongs to another scheduler, or did
        meanwhile: every commanding scheduler makes an epoch."""
        assert self._held is not None
        if revision is None:
            return None
        lease = self._held.goes_on(revision)
        if lease is not None and not self._has_missed:
            return lease
        newest = await newest_epoch(self.store, self.bus.run)
        return HeldLease(self._held.epoch, revision) if newest == self._held.epoch else None

    async def _write(self, *, on: int) -> int | None:
        data = self._mine.model_dump_json().encode()
        return await self._register.write(data.ljust(limits.LEASE_ENTRY_BYTES), replaces=on)

    async def _release(self) -> None:
        lease, self._held = self._held, None
        if lease is None:
            return
        data = self._mine.model_copy(update={"released": True}).model_dump_json().encode()
        with suppress(Unavailable):
            entry = await self._register.read()
            if entry is not None and self._is_mine(entry):
                await self._register.write(data, replaces=entry.revision)
        log.info("lease_released", epoch=lease.epoch)

    def _stand_by(self, reason: str) -> None:
        if self.health.reason != reason:
            log.info("standby", reason=reason)
        self.health.is_not_ready(reason)


def _is_free(record: LeaseRecord) -> bool:
    return record.released or record.process.is_gone


def _decoded(entry: RegisterEntry) -> LeaseRecord | None:
    """Return what the register holds, None if it is nothing of this release."""
    try:
        return LeaseRecord.model_validate_json(entry.data)
    except ValidationError:
        return None


async def newest_epoch(store: ObjectStore, run: str) -> int:
    """Return the newest epoch of the run, 0 if it has none."""
    return max(await numbers_in(store, run, "epochs"), default=0)


async def claim_epoch(store: ObjectStore, run: str, revision: int, scheduler: str) -> int:
    """Make a new epoch, and return its number."""
    while True:
        numbers = await numbers_in(store, run, "epochs")
        epoch = next_epoch(revision, max(numbers, default=0))
        record = EpochRecord(epoch=epoch, scheduler=scheduler)
        if await store.create(epoch_key(run, epoch), record.model_dump_json().encode()):
            await store.delete([epoch_key(run, old) for old in numbers[: 1 - MAX_KEPT_EPOCHS]])
            return epoch
