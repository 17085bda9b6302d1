"""A machine that a test feeds with events, one a second, and what it answers."""

from collections.abc import Callable
from typing import Any

from services.scheduler.core.inputs import MachineInput, WorkerJoined
from services.scheduler.core.machine import step
from services.scheduler.core.state import State
from shared.messages.contracts import Command, Fragment, GenerateFragment, TrainGroup
from tests import examples

Rewards = tuple[float | None, ...]
EARLY: dict[str, Any] = {"max_staleness": 1}


def joined(name: str, service: str = "rollout", life: int = 0) -> WorkerJoined:
    return WorkerJoined(f"{name}-{life}", name, service)


class Machine:
    """Feeds events to the machine one after another, a second apart."""

    def __init__(self, *workers: str, **plan: Any) -> None:
        self.plan = examples.plan(**plan)
        self.state = State()
        self.now = 0.0
        self.told: list[MachineInput | Command] = []
        for worker in workers or ("a",):
            self.handle(joined(worker))

    def handle(self, event: MachineInput) -> list[Command]:
        self.now += 1
        self.state, commands = step(self.plan, self.state, event, self.now)
        self.told += [event, *commands]
        return commands

    def tasks(self, event: MachineInput) -> list[GenerateFragment]:
        return [c for c in self.handle(event) if isinstance(c, GenerateFragment)]

    def finish(
        self, tasks: list[GenerateFragment], rewards: Callable[[Fragment], Rewards] | None = None
    ) -> list[TrainGroup]:
        """Generate and score these tasks and whatever they make room for."""
        trained: list[TrainGroup] = []
        while tasks:
            task = tasks.pop(0)
            given = None if rewards is None else rewards(task.fragment)
            for command in [
                *self.handle(examples.generated(task)),
                *self.handle(examples.scored(task, given)),
            ]:
                if isinstance(command, TrainGroup):
                    trained.append(command)
                elif isinstance(command, GenerateFragment):
                    tasks.append(command)
        return trained
