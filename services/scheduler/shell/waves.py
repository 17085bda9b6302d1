"""Applies events that wait, and divides the commands that follow into short bursts, in the order of
sending."""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from services.scheduler.core.machine import MachineInput, step
from services.scheduler.core.state import Plan, State
from shared.messages.contracts import Command, GenerateFragment
from shared.messages.fluid import TrainPiece

SENT_AT_ONCE = 16
"""Commands sent concurrently; statuses are heard in between."""
BACKLOG = 8
"""Events that wait from which they are applied together: of few, each is answered at once."""
TOGETHER_S = 0.02
"""Seconds of applying events after which what follows of them is sent, and others have a turn."""


class Applied(NamedTuple):
    """An event, and what it has made of the state."""

    event: MachineInput
    before: State
    after: State


def apply_together(
    plan: Plan, state: State, event: MachineInput, following: Iterable[MachineInput]
) -> tuple[list[Applied], list[Command]]:
    """Apply an event, and ``following`` ones until there are as many commands as are sent at once,
    so that whoever waits for one of these waits for the broker's disk once."""
    applied, commands = list[Applied](), list[Command]()
    began = now = time.monotonic()
    for each in itertools.chain([event], following):
        before = state
        state, more = step(plan, before, each, now)
        applied.append(Applied(each, before, state))
        commands += more
        now = time.monotonic()
        if len(commands) >= SENT_AT_ONCE or now - began > TOGETHER_S:
            break
    return applied, commands


def in_waves(commands: Sequence[Command]) -> Iterator[list[Command]]:
    """Yield the commands to send at once, one wave after the other.

    The broker syncs each message to its disk, a millisecond or more, and delivers none of a burst
    before it has stored all of it. So bursts are short, and each device is given its first piece of
    work before anybody is given what waits behind it.
    """
    first, waiting, busy = list[Command](), list[Command](), set[str]()
    for command in commands:
        if isinstance(command, GenerateFragment | TrainPiece):
            (waiting if command.worker in busy else first).append(command)
            busy.add(command.worker)
        else:
            first.append(command)
    for part in (first, waiting):
        for begin in range(0, len(part), SENT_AT_ONCE):
            yield part[begin : begin + SENT_AT_ONCE]
