"""Names the inputs of the scheduler's state machine: messages, and what its shell observes of
workers."""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from services.scheduler import limits
from services.scheduler.core.fluid.events import LinkMeasured as LinkMeasured
from services.scheduler.core.fluid.events import MemberReported, VersionLoaded
from shared.messages.contracts import (
    Event,
    FragmentGenerated,
    FragmentScored,
    GenerateFragment,
    TrainGroup,
)
from shared.messages.fluid import FluidCommand, PieceTrained, Stepped, SumHeld
from shared.messages.workers import DeviceMode


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """The shell has heard a worker for the first time, or again."""

    address: str
    name: str
    service: str
    concurrency: int = 1
    kind: str = "cpu"
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """The shell has not heard a worker for too long."""

    address: str


@dataclass(frozen=True, slots=True)
class DeviceReported:
    """A member has reported what its device is used for."""

    address: str
    loan_number: int
    mode: DeviceMode


@dataclass(frozen=True, slots=True)
class WorkerInactive:
    """A worker has reported that it is not doing the work that it has."""

    address: str
    doing: Literal["loading", "nothing"]


@dataclass(frozen=True, slots=True)
class GoalReached:
    """Evaluations have reached `run.stop_at`."""

    version: int
    """The version by which they have."""


@dataclass(frozen=True, slots=True)
class RecoveryDone:
    """Everything stored has been read; from here on commands are issued, in this epoch."""

    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


MachineInput = (
    Event | GenerateFragment | TrainGroup | FluidCommand | MemberReported | VersionLoaded
    | WorkerJoined | WorkerLeft | WorkerInactive | DeviceReported | LinkMeasured
    | GoalReached | RecoveryDone | Tick
)  # fmt: skip

BATCHED_REPORTS = (
    FragmentGenerated | FragmentScored | PieceTrained | SumHeld | Stepped
    | MemberReported | VersionLoaded | LinkMeasured | WorkerJoined | WorkerInactive
)  # fmt: skip
"""Reports of devices about their work and themselves. The effects of one report change no other
report, so commands may be issued for several at a time."""


def take_together(*waiting: deque[MachineInput]) -> list[MachineInput]:
    """Take inputs that may be applied together from the queues, earlier queues first: consecutive
    reports, or one other input; empty if all queues are empty."""
    reports = list[MachineInput]()
    for queue in waiting:
        while queue and len(reports) < limits.MAX_REPORTS and isinstance(queue[0], BATCHED_REPORTS):
            reports.append(queue.popleft())
        if queue and not reports:
            return [queue.popleft()]
    return reports
