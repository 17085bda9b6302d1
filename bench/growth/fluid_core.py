"""CPU seconds of the scheduler's core with fluid devices, by the number of members."""

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Literal

from bench.growth.core import plan_of, policy_of, published, results_of
from services.scheduler.core.fluid.cutting import group_share
from services.scheduler.core.fluid.events import MemberReported
from services.scheduler.core.inputs import MachineInput, WorkerJoined
from services.scheduler.core.machine import step
from services.scheduler.core.state import Plan, State
from shared.messages.contracts import Command, GenerateFragment, PolicyPublished
from shared.messages.fluid import (
    ExchangeSums,
    FluidCommand,
    PieceTrained,
    Stepped,
    SumHeld,
    TakeStep,
    TrainPiece,
)
from shared.messages.workers import Holds
from shared.recipe.schedule import RunSchedule

GROUP_SECONDS = 1.0
"""Device time of a group's gradient."""
COMMIT_SECONDS = 0.5
"""From the committer's step to the announcement of the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidCosts:
    members: int
    events: int
    pieces: int
    """Number of training pieces of one batch."""
    event_seconds: float
    """Mean CPU seconds of an event."""
    slowest_seconds: float
    """CPU seconds of the slowest event."""
    slowest: str
    """What that was."""
    seconds_by_kind: dict[str, tuple[int, float]]
    """Number and CPU seconds of the events of each kind."""


@dataclass(slots=True)
class Fluid:
    """Members that answer as they would, and the seconds that the core takes."""

    plan: Plan
    addresses: list[str]
    state: State
    random: Random
    seconds: dict[str, tuple[int, float]]
    slowest: tuple[float, str] = (0.0, "")
    pieces: int = 0

    def run(self, batches: int) -> None:
        """Open so many batches, one after the other, until the last is committed."""
        numbers = count()
        due: list[tuple[float, int, MachineInput]] = []
        free = dict.fromkeys(self.addresses, 0.0)
        heapq.heappush(due, (0.0, next(numbers), opened(0)))
        for address in self.addresses:
            holds = Holds(version=0, checksum=checksum_of(0), update=0, sum_bytes=0)
            heapq.heappush(due, (0.0, next(numbers), MemberReported(address, holds)))
        while due and (self.state.policy is None or self.state.policy.version < batches):
            now, _, event = heapq.heappop(due)
            for command in self._apply(event, now):
                for at, answer in self._answers(command, now, free):
                    heapq.heappush(due, (at, next(numbers), answer))

    def _apply(self, event: MachineInput, now: float) -> list[Command]:
        kind = type(event).__name__
        began = time.thread_time()
        self.state, commands = step(self.plan, self.state, event, now)
        seconds = time.thread_time() - began
        number, total = self.seconds.get(kind, (0, 0.0))
        self.seconds[kind] = number + 1, total + seconds
        self.slowest = max(self.slowest, (seconds, kind))
        return commands

    def _answers(
        self, command: Command, now: float, free: dict[str, float]
    ) -> Iterator[tuple[float, MachineInput]]:
        if isinstance(command, GenerateFragment):
            at = max(now, free[command.worker]) + self.random.uniform(0.9, 1.1)
            free[command.worker] = at
            for result in results_of(command):
                yield at, result
                at += 0.05
        elif isinstance(command, FluidCommand):
            yield from self._fluid_answers(command, now, free)

    def _fluid_answers(
        self, command: FluidCommand, now: float, free: dict[str, float]
    ) -> Iterator[tuple[float, MachineInput]]:
        batch = command.batch
        match command:
            case TrainPiece(worker=worker):
                self.pieces += 1
                seconds = group_share(self.plan, command.piece) * GROUP_SECONDS
                free[worker] = max(now, free[worker]) + seconds
                yield (
                    free[worker],
                    PieceTrained(**command.answer_fields, seconds=seconds, pass_rows=0),
                )
            case ExchangeSums():
                for share in command.shares:
                    yield now + 0.1, SumHeld(
                        **command.answer_fields, worker=share.worker, sum_id=f"{batch:064x}",
                        norm=1.0, finite=True, scale=1.0, seconds=0.0,
                    )  # fmt: skip
            case TakeStep():
                version = batch + 1
                for address in self.addresses:
                    yield now + 0.05, Stepped(
                        **command.answer_fields, worker=address, policy=policy_of(version),
                        checksum=checksum_of(version), is_reference=False, seconds=0.0,
                    )  # fmt: skip
                yield now + 0.05 + COMMIT_SECONDS, opened(version)


def checksum_of(version: int) -> str:
    return f"{version:032x}"


def opened(version: int) -> PolicyPublished:
    return published(version).model_copy(update={"checksum": checksum_of(version)})


def measure(
    members: int,
    *,
    groups_per_member: float = 1.0,
    batches: int = 2,
    max_staleness: Literal[0, 1] = 0,
) -> FluidCosts:
    """Bring so many batches to their commits."""
    plan = plan_of(members, 2)
    plan = replace(
        plan, num_groups=round(members * groups_per_member), trained_steps=8,
        schedule=RunSchedule(mode="fluid", fragment_size=4, max_staleness=max_staleness),
    )  # fmt: skip
    addresses = [f"m{number}-0" for number in range(members)]
    state = State()
    for number, address in enumerate(addresses):
        state, _ = step(plan, state, WorkerJoined(address, f"m{number}", "trainer"), 0.0)
    fluid = Fluid(plan, addresses, state, Random(0), {})
    fluid.run(batches)
    events = sum(number for number, _ in fluid.seconds.values())
    total = sum(seconds for _, seconds in fluid.seconds.values())
    return FluidCosts(
        members=members,
        events=events,
        pieces=fluid.pieces // batches,
        event_seconds=total / events,
        slowest_seconds=fluid.slowest[0],
        slowest=fluid.slowest[1],
        seconds_by_kind=fluid.seconds,
    )
