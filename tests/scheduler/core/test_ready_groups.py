"""Which whole groups are sent to the trainer, and what a trainer generates beside them."""

from services.scheduler.core.inputs import WorkerJoined
from shared.messages.contracts import (
    Command,
    GenerateFragment,
    SetDevice,
    TagRequest,
    TrainGroup,
)
from tests import examples
from tests.scheduler.core.machine_driver import Machine


def run(machine: Machine, commands: list[Command]) -> list[Command]:
    """Generate and score all that is commanded."""
    seen: list[Command] = []
    waiting = list(commands)
    while waiting:
        command = waiting.pop(0)
        seen.append(command)
        if isinstance(command, GenerateFragment):
            waiting += machine.handle(examples.generated(command))
            waiting += machine.handle(examples.scored(command))
    return seen


def groups(commands: list[Command]) -> list[TrainGroup]:
    return [c for c in commands if isinstance(c, TrainGroup)]


def test_every_whole_group_goes_to_the_trainer_at_once() -> None:
    machine = Machine(num_groups=8)
    machine.handle(WorkerJoined("trainer-0", "trainer", "trainer", concurrency=0))
    commands = run(machine, machine.handle(examples.published(0)))
    assert sorted(c.group for c in groups(commands)) == list(range(8))


def test_a_trainer_of_independent_devices_is_lent_until_its_share_is_generated() -> None:
    machine = Machine("a", num_groups=4)
    machine.handle(WorkerJoined("t-0", "t", "trainer", concurrency=2, independent_devices=True))
    machine.handle(TagRequest(mode="fixed", groups=2, id="x"))
    commands = machine.handle(examples.published(0))
    [lent] = [c for c in commands if isinstance(c, SetDevice)]
    assert lent.mode == "generate"
    mine = [c for c in commands if isinstance(c, GenerateFragment) and c.worker == "t-0"]
    assert {c.fragment.group for c in mine} == {2, 3}  # from the end of the batch
    # A group of the others is ready to train: it stays lent, for its devices train by themselves.
    theirs = [c for c in commands if isinstance(c, GenerateFragment) and c.worker == "a-0"]
    after = run(machine, list(theirs))
    assert groups(after) and not [c for c in after if isinstance(c, SetDevice)]
    done = run(machine, list(mine))
    assert [c.mode for c in done if isinstance(c, SetDevice)][-1] == "train"
