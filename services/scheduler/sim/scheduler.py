"""The scheduler's shell in the simulated cluster: the same core, without faults."""

from collections import deque
from dataclasses import dataclass, field

from services.scheduler.core.fluid.events import MemberReported
from services.scheduler.core.inputs import DeviceReported, MachineInput, RecoveryDone, take_together
from services.scheduler.core.machine import step_together
from services.scheduler.core.state import Plan, State
from services.scheduler.sim.broker import Broker
from services.scheduler.sim.world import World
from shared.devices.loan import Loan
from shared.messages import subjects
from shared.messages.workers import Holds

FOLLOWED_STREAMS = (subjects.TRAJ, subjects.REW, subjects.FLUID, subjects.EVT)


@dataclass(slots=True)
class SimScheduler:
    world: World
    broker: Broker
    plan: Plan
    state: State
    _inbox: deque[MachineInput] = field(default_factory=deque)

    def start(self) -> None:
        """Follow the streams, in which nothing is stored yet."""
        self._apply(RecoveryDone())
        for stream in FOLLOWED_STREAMS:
            self.broker.subscribe(stream, self.handle)  # type: ignore[arg-type]

    def member_reported(self, address: str, holds: Holds | None, loan: Loan | None) -> None:
        """Handle what a member could step from, and whether it is lent."""
        self.handle(MemberReported(address, holds))
        if loan is not None:
            self.handle(DeviceReported(address, loan.loan_number, loan.mode))

    def handle(self, event: MachineInput) -> None:
        """Handle an event, after those that arrived before it."""
        self._inbox.append(event)
        while self._inbox:
            self._apply(*take_together(self._inbox))

    def _apply(self, *events: MachineInput) -> None:
        state, commands = step_together(self.plan, self.state, events, self.world.now)
        for command in commands:
            self.broker.publish(command)
        self.state = state
