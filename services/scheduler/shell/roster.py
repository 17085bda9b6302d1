"""Keeps track of the workers that report: who takes part, who is refused, and who has left."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from services.scheduler import limits
from services.scheduler.core.fluid.events import MemberReported, VersionLoaded
from services.scheduler.core.inputs import (
    DeviceReported,
    LinkMeasured,
    MachineInput,
    WorkerInactive,
    WorkerJoined,
    WorkerLeft,
)
from services.scheduler.core.leases import Leases
from services.scheduler.core.state import State, WorkerState
from services.scheduler.core.usage import UsageMeter
from services.scheduler.core.workers import GENERATES
from shared.bus.bus import Bus
from shared.messages.workers import Activity, Transferred, WorkerRefused, WorkerStatus
from shared.release import refusal
from shared.run.usage import DeviceUse

ACTIVITY_USES: dict[Activity, DeviceUse] = {
    "loading_weights": "waiting_for_weights",
    "waiting_for_conditions": "waiting_for_conditions",
}
"""Activities of a rollout device in which it does not do the work that it has."""

MIN_BYTE_S, MAX_BYTE_S = 1e-13, 1.0
"""Seconds per byte of the fastest and of the slowest line: other values are faults."""

log = structlog.get_logger()


@dataclass(slots=True)
class LastStatus:
    status: WorkerStatus
    at: float
    """Monotonic time of the status, in seconds."""
    refused: str | None = None
    """Why the worker is refused, apart from its device."""


@dataclass(slots=True)
class Roster:
    """Turns statuses and their absence into inputs of the machine."""

    _bus: Bus
    _put: Callable[[MachineInput], None]
    _state: Callable[[], State]
    _meter: UsageMeter
    statuses: dict[str, LastStatus] = field(default_factory=dict)
    """Newest status of each worker, by address."""
    leases: Leases = field(default_factory=Leases)
    num_waiting: Callable[[], int] = lambda: 0
    """Returns the number of received statuses that are not recorded yet."""

    async def record(self, status: WorkerStatus) -> None:
        now = time.monotonic()
        if other := refusal(f"worker {status.worker}", status.versions.get("digenrl")):
            await self._refuse(status, now, other)
        else:
            await self._record(status, now)

    async def _record(self, status: WorkerStatus, now: float) -> None:
        address = status.address
        heard = self.leases.hear(address, status.worker, now)
        if heard == "refused":
            await self._refuse(status, now, _name_taken(status))
        if heard in ("waits", "refused"):
            return
        before = self.statuses.get(address)
        if heard == "joined":
            self._welcome(status)
        elif before is not None:
            self._count_waits(before.status, status)
        self.statuses[address] = LastStatus(status, now)
        stood = _stood(status, self._state().workers.get(address))
        if stood is not None:
            self._put(stood)
        if status.service in ("rollout", "trainer"):
            self._record_line(before, status)
            self._record_version(before, status)
        if status.loan is not None and status.device.refusal is None:
            report = DeviceReported(address, status.loan.loan_number, status.loan.mode)
            self._put(report)

    def _record_version(self, before: LastStatus | None, status: WorkerStatus) -> None:
        """Record the version that a worker has, unless it had it at its status before."""
        if status.service == "trainer":
            if not _is_known(self._state(), status):
                self._put(MemberReported(status.address, status.holds))
        elif before is None or before.status.staged != status.staged:
            version = -1 if status.staged is None else status.staged
            self._put(VersionLoaded(status.address, version))

    def _record_line(self, before: LastStatus | None, status: WorkerStatus) -> None:
        """Record what a worker's line has taken since its status before."""
        old = None if before is None else before.status
        up = seconds_per_byte(old.sent if old else None, status.sent)
        down = seconds_per_byte(old.received if old else None, status.received)
        if up is not None or down is not None:
            self._put(LinkMeasured(status.address, up, down))

    def _count_waits(self, before: WorkerStatus, status: WorkerStatus) -> None:
        """Count the time in which a device that has a fragment waited for something else."""
        if status.service != "rollout":
            return
        for activity, use in ACTIVITY_USES.items():
            waited = status.seconds.get(activity, 0.0) - before.seconds.get(activity, 0.0)
            if waited > 0:
                self._meter.move(status.worker, waited, "generating", use)

    async def _refuse(self, status: WorkerStatus, now: float, reason: str) -> None:
        if status.address not in self.statuses:
            log.error("worker_refused", name=status.worker, host=status.host, reason=reason)
        self.statuses[status.address] = LastStatus(status, now, refused=reason)
        await self._bus.send(WorkerRefused(worker=status.address, reason=reason))

    def _welcome(self, status: WorkerStatus) -> None:
        self.statuses = {a: s for a, s in self.statuses.items() if s.status.worker != status.worker}
        refusal = status.device.refusal
        if refusal is not None:
            log.error("worker_refused", name=status.worker, reason=refusal)
            return
        log.info("worker_joined", name=status.worker, service=status.service)
        if status.service == "encoder":
            return  # it is given no work
        self._put(
            WorkerJoined(
                status.address,
                status.worker,
                status.service,
                concurrency=status.device.concurrency,
                kind=status.device.kind,
                ranks=status.device.ranks,
            )
        )

    def versions_in_use(self) -> set[int]:
        reported = (each.status.policy_version for each in self.statuses.values())
        return {version for version in reported if version is not None}

    async def watch(self) -> None:
        """End expired leases in a loop; time in which this process was busy does not count."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(limits.ROSTER_CHECK_S)
            now, waiting = time.monotonic(), self.num_waiting()
            # While statuses wait to be recorded, nobody is silent.
            self.leases.prolong(
                max(0.0, now - before - (0.0 if waiting else limits.ROSTER_CHECK_S))
            )
            before = now
            for address in self.leases.end(now):
                self.statuses.pop(address, None)
                self._put(WorkerLeft(address))
                log.warning("worker_left", address=address)
            for address in [
                a for a, status in self.statuses.items() if status.at < now - limits.LEASE_S
            ]:
                if self.statuses[address].refused:
                    del self.statuses[address]


def _is_known(state: State, status: WorkerStatus) -> bool:
    """Return whether a member still holds what it reported before, as it does every second."""
    return state.fluid is not None and state.fluid.holds.get(status.address) == status.holds


def seconds_per_byte(before: Transferred | None, now: Transferred | None) -> float | None:
    """Return what a line has taken between two statuses; None: no bytes, or a rate of no line."""
    num_bytes, seconds = (now.num_bytes, now.seconds) if now is not None else (0, 0.0)
    if before is not None:
        num_bytes, seconds = num_bytes - before.num_bytes, seconds - before.seconds
    each = seconds / num_bytes if num_bytes > 0 else 0.0
    return each if MIN_BYTE_S <= each <= MAX_BYTE_S else None


def _stood(status: WorkerStatus, worker: WorkerState | None) -> WorkerInactive | None:
    """Text of the status about the deadlines of the worker's work, if any."""
    if worker is None or worker.service not in GENERATES:
        return None
    if status.activity == "starting" or status.activity in ACTIVITY_USES:
        return WorkerInactive(status.address, "loading")
    idles = worker.excluded == "late" and status.activity.startswith("waiting")
    return WorkerInactive(status.address, "nothing") if idles else None


def _name_taken(status: WorkerStatus) -> str:
    return (
        f"another worker is named {status.worker!r}; give each a name of its own with "
        "--worker or DIGENRL_WORKER"
    )
