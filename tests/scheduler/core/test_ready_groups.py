"""Which whole groups are sent to the trainer, and what a trainer generates beside them."""

from services.scheduler.core.inputs import WorkerJoined
from shared.messages.contracts import Command, GenerateFragment, SetDevice, TagRequest, TrainGroup
from tests import examples
from tests.scheduler.core.machine_driver import Machine, joined


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


def test_several_members_are_lent_until_their_share_is_generated() -> None:
    machine = Machine("a", num_groups=4)
    for name in ("t", "u"):
        machine.handle(joined(name, "trainer"))
    machine.handle(TagRequest(mode="fixed", groups=2, id="x"))
    commands = machine.handle(examples.published(0))
    lent = {c.worker: c.mode for c in commands if isinstance(c, SetDevice)}
    assert lent == {"t-0": "generate", "u-0": "generate"}
    mine = [c for c in commands if isinstance(c, GenerateFragment) and c.worker in lent]
    assert {c.fragment.group for c in mine} == {0, 1, 2}  # in order, as the others
    # A group of the others is ready to train: members stay lent, for each trains by itself.
    theirs = [c for c in commands if isinstance(c, GenerateFragment) and c.worker == "a-0"]
    after = run(machine, list(theirs))
    assert groups(after) and not [c for c in after if isinstance(c, SetDevice)]
    done = run(machine, list(mine))
    returned = {c.worker for c in done if isinstance(c, SetDevice) and c.mode == "train"}
    assert returned == set(lent)
