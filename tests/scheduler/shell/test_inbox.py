"""Scores go before what waits, and nothing else changes places."""

from services.scheduler.core.machine import MachineInput, Tick, WorkerLeft
from services.scheduler.shell.inbox import Inbox
from tests import examples


async def test_scores_come_first_and_everything_else_as_it_came() -> None:
    inbox = Inbox()
    first, second = (examples.scored(examples.task(group=group)) for group in (0, 1))
    made = examples.generated(examples.task(group=2))
    told: list[MachineInput] = [WorkerLeft("a"), first, Tick(), made, WorkerLeft("b"), second]
    for event in told:
        inbox.put(event)
    taken = [await inbox.get() for _ in told]
    assert taken == [first, second, WorkerLeft("a"), Tick(), made, WorkerLeft("b")]
