"""Each device is sent its first piece of work before anybody is sent a second one."""

import pytest

from services.scheduler.core.machine import Tick
from services.scheduler.shell import waves
from services.scheduler.shell.app import OPENING
from services.scheduler.shell.inbox import Inbox
from services.scheduler.shell.waves import SENT_AT_ONCE, apply_together, in_waves
from shared.messages.contracts import Command, GenerateFragment, SetDevice
from tests import examples
from tests.scheduler.core.machine_driver import Machine


def task(worker: int, number: int) -> GenerateFragment:
    found = examples.task(group=number)
    return found.model_copy(update={"worker": f"gpu-{worker}"})


def waiting(machine: Machine) -> Inbox:
    """Return an inbox in which each device says that it has generated what it was told."""
    inbox = Inbox()
    for told in machine.tasks(examples.published(0)):
        inbox.put(examples.generated(told))
    return inbox


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waves, "TOGETHER_S", 60.0)


async def test_events_that_wait_are_applied_together_as_one_after_the_other() -> None:
    names = [f"gpu-{number}" for number in range(8)]
    machine, alone = (Machine(*names, num_groups=14) for _ in range(2))
    inbox = waiting(machine)
    applied, commands = apply_together(
        machine.plan, machine.state, await inbox.get(), inbox.next_but(OPENING)
    )
    assert inbox.is_empty and len(applied) == 16
    alone.handle(examples.published(0))
    one_by_one = [each for event, *_ in applied for each in alone.handle(event)]
    assert commands == one_by_one and commands
    assert [before for _, before, _ in applied[1:]] == [after for *_, after in applied[:-1]]


async def test_no_more_is_applied_than_is_sent_at_once_and_what_opens_a_batch_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(*(f"gpu-{number}" for number in range(40)), num_groups=80)
    inbox = waiting(machine)
    _, commands = apply_together(
        machine.plan, machine.state, await inbox.get(), inbox.next_but(OPENING)
    )
    assert len(commands) == SENT_AT_ONCE and not inbox.is_empty
    inbox = Inbox()
    for event in (Tick(), Tick(), examples.published(1), Tick()):
        inbox.put(event)
    assert list(inbox.next_but(OPENING)) == [Tick(), Tick()]
    assert await inbox.get() == examples.published(1)
    monkeypatch.setattr(waves, "TOGETHER_S", 0.0)
    assert len(apply_together(machine.plan, machine.state, Tick(), [Tick()])[0]) == 1


def test_what_waits_behind_other_work_is_sent_last_and_everything_once() -> None:
    loan = SetDevice(worker="gpu-0", loan_number=1, mode="train")
    commands: list[Command] = [*(task(each // 2, each) for each in range(6)), loan]
    first, second = in_waves(commands)
    assert first == [commands[0], commands[2], commands[4], loan]
    assert second == [commands[1], commands[3], commands[5]]


def test_no_more_are_sent_at_once_than_leave_a_turn_to_others() -> None:
    waves = list(in_waves([task(each % 20, each) for each in range(40)]))
    assert [len(wave) for wave in waves] == [SENT_AT_ONCE, 4, SENT_AT_ONCE, 4]
    assert list(in_waves([])) == []
