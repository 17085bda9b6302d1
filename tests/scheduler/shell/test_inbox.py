"""Scores go before what waits, and nothing else changes places; reports are applied together."""

from services.scheduler import limits
from services.scheduler.core.inputs import MachineInput, Tick, WorkerLeft
from services.scheduler.shell.inbox import Inbox
from tests import examples


async def test_scores_come_first_and_everything_else_as_it_came() -> None:
    inbox = Inbox()
    first, second = (examples.scored(examples.task(group=group)) for group in (0, 1))
    made = examples.generated(examples.task(group=2))
    told: list[MachineInput] = [WorkerLeft("a"), first, Tick(), made, WorkerLeft("b"), second]
    for event in told:
        inbox.put(event)
    taken = [await inbox.get() for _ in range(5)]
    assert taken == [[first, second], [WorkerLeft("a")], [Tick()], [made], [WorkerLeft("b")]]
    assert inbox.is_empty


async def test_reports_that_wait_behind_each_other_are_taken_together_up_to_a_number() -> None:
    inbox = Inbox()
    made = [examples.generated(examples.task(group=number)) for number in range(limits.MAX_REPORTS)]
    scored = examples.scored(examples.task(group=0))
    told: list[MachineInput] = [*made, scored]
    for event in told:
        inbox.put(event)
    assert [await inbox.get(), await inbox.get()] == [[scored, *made[:-1]], made[-1:]]
    assert inbox.is_empty
