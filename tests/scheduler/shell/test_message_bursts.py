"""Each device is sent its first piece of work before anybody is sent a second one."""

from services.scheduler import limits
from services.scheduler.shell.message_bursts import message_bursts
from shared.messages.contracts import Command, GenerateFragment, SetDevice
from tests import examples


def task(worker: int, number: int) -> GenerateFragment:
    found = examples.task(group=number)
    return found.model_copy(update={"worker": f"gpu-{worker}"})


def test_what_waits_behind_other_work_is_sent_last_and_everything_once() -> None:
    loan = SetDevice(worker="gpu-0", loan_number=1, mode="train")
    commands: list[Command] = [*(task(each // 2, each) for each in range(6)), loan]
    first, second = message_bursts(commands)
    assert first == [commands[0], commands[2], commands[4], loan]
    assert second == [commands[1], commands[3], commands[5]]


def test_no_more_are_sent_at_once_than_leave_a_turn_to_others() -> None:
    waves = list(message_bursts([task(each % 20, each) for each in range(40)]))
    assert [len(wave) for wave in waves] == [
        limits.MAX_CONCURRENT_SENDS,
        4,
        limits.MAX_CONCURRENT_SENDS,
        4,
    ]
    assert list(message_bursts([])) == []
