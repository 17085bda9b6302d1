"""The scheduler's shell in the simulated cluster: the same core, the same leases and recovery."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from services.scheduler.core.assigned import busy_addresses
from services.scheduler.core.fluid.events import MemberReported
from services.scheduler.core.inputs import (
    DeviceReported,
    MachineInput,
    Recovered,
    Tick,
    WorkerInactive,
    WorkerJoined,
    WorkerLeft,
    take_together,
)
from services.scheduler.core.leases import Leases
from services.scheduler.core.machine import step_together
from services.scheduler.core.recovery import READ_BACK
from services.scheduler.core.state import Plan, State
from services.scheduler.sim.broker import Broker
from services.scheduler.sim.commits import Commits
from services.scheduler.sim.devices import REF
from services.scheduler.sim.world import Process
from shared.devices.loan import Loan
from shared.messages import subjects
from shared.messages.contracts import (
    Message,
    PolicyPublished,
)
from shared.messages.workers import Holds

FOLLOWED = (subjects.TRAJ, subjects.REW, subjects.FLUID, subjects.EVT)
WATCH_S = 0.5


class Status(NamedTuple):
    """What a worker says of itself; a lighter `WorkerStatus`."""

    worker: WorkerJoined
    loan: Loan | None = None
    idles: bool = False
    """It says that it has nothing to do."""
    holds: Holds | None = None
    """What a member could step from."""


@dataclass(slots=True)
class SimScheduler:
    process: Process
    broker: Broker
    plan: Plan
    commits: Commits
    first_state: State
    tick: float | None = None
    leases: bool = False
    """Whether workers report, and are lost when they do not."""
    epoch: int = 0
    """Epoch of its commands."""
    state: State = field(init=False)
    is_ready: bool = False
    """Whether it has recovered."""
    _num_commits: int = 0
    """Commits that it knows of."""
    _announced: list[PolicyPublished] = field(default_factory=list)
    """Found in the stream, but not among the commits that were read before it."""
    _followed: dict[str, int] = field(default_factory=dict)
    """Stream -> messages read by recovery."""
    _leases: Leases = field(default_factory=Leases)
    _inbox: deque[MachineInput] = field(default_factory=deque)

    def start(self) -> None:
        """Begin an epoch and read what is stored, then handle events as they come."""
        self.broker.begin_epoch(self.epoch)
        self.state = self.first_state
        self._num_commits = len(self.commits.versions)
        if self._num_commits:
            newest = self.commits.versions[-1]
            self._apply(PolicyPublished(
                policy=newest.policy, weights=REF, worker="trainer", seconds=0.0,
                checksum=newest.checksum,
            ))  # fmt: skip
        self._read()

    def _read(self) -> None:
        """Read what is stored, one stream after another."""
        for stream in READ_BACK:
            stored = self.broker.stored.get(stream.name, [])
            self._followed[stream.name] = len(stored)
            for message in stored:
                if isinstance(message, PolicyPublished):
                    self._announced.append(message)
                else:
                    self._apply(message)  # type: ignore[arg-type]
        self._follow()

    def _follow(self) -> None:
        self._apply(Recovered())
        self.is_ready = True
        self._leases.expect(sorted(busy_addresses(self.state)), self.process.world.now)
        for announcement in self._announced:
            self._received(announcement)
        for stream in FOLLOWED:
            self.broker.subscribe(
                self.process, stream, self._received, after=self._followed[stream.name]
            )
        if self.tick is not None:
            self.process.after(self.tick, self._tick)
        if self.leases:
            self.process.after(WATCH_S, self._watch)

    def joined(self, worker: WorkerJoined) -> None:
        self._handle(worker)

    def member_reported(self, address: str, holds: Holds | None, loan: Loan | None) -> None:
        """A member says at once what it could step from, and whether it is lent."""
        self._handle(MemberReported(address, holds))
        if loan is not None:
            self._handle(DeviceReported(address, loan.loan_number, loan.mode))

    def reported(self, status: Status) -> None:
        """A status has arrived."""
        if not self.is_ready:
            return
        worker = status.worker
        heard = self._leases.hear(worker.address, worker.name, self.process.world.now)
        if heard in ("waits", "refused"):
            return
        if heard == "joined":
            self._handle(worker)
        known = self.state.workers.get(worker.address)
        if status.idles and known is not None and known.excluded == "late":
            self._handle(WorkerInactive(worker.address, "nothing"))
        if worker.service == "trainer":
            self.member_reported(worker.address, status.holds, status.loan)

    def _watch(self) -> None:
        for address in self._leases.end(self.process.world.now):
            self._handle(WorkerLeft(address))
        self.process.after(WATCH_S, self._watch)

    def _tick(self) -> None:
        assert self.tick is not None
        self._handle(Tick())
        self.process.after(self.tick, self._tick)

    def _received(self, message: Message) -> None:
        if not isinstance(message, PolicyPublished):
            self._handle(message)  # type: ignore[arg-type]
        elif self._is_committed(message):
            while self._num_commits <= message.policy.version:  # one may have been missed
                commit = self.commits.versions[self._num_commits]
                self._num_commits += 1
                found = {"policy": commit.policy, "checksum": commit.checksum}
                self._handle(message.model_copy(update=found))

    def _is_committed(self, event: PolicyPublished) -> bool:
        """Only the commit record is believed."""
        versions, number = self.commits.versions, event.policy.version
        return number < len(versions) and versions[number].policy == event.policy

    def _handle(self, event: MachineInput) -> None:
        """Take events in the order of arrival."""
        self._inbox.append(event)
        while self._inbox and self.process.alive:
            self._apply(*take_together(self._inbox))

    def _apply(self, *events: MachineInput) -> None:
        state, commands = step_together(self.plan, self.state, events, self.process.world.now)
        for command in commands:
            self.broker.publish(command, self.epoch)
        self.state = state
