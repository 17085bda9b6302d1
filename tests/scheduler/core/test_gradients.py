"""Who computes gradients: the trainer, rollout devices that can train, colocated devices."""

from typing import Any

from services.scheduler.core.inputs import DeviceReported, WorkerJoined, WorkerLeft
from shared.messages.contracts import (
    Command,
    ComputeGradient,
    GenerateFragment,
    GradientComputed,
    GradientReleased,
    GroupFailed,
    GroupGradientRef,
    GroupTrained,
    ObjectRef,
    SetDevice,
    TrainGroup,
)
from tests import examples
from tests.scheduler.core.machine_driver import Machine

REF = ObjectRef(key="demo/gradient", sha256="0" * 64, size=1)
TRAINER = WorkerJoined("trainer-0", "trainer", "trainer", concurrency=0)
BEHIND = 100.0
"""Seconds in which the trainer trains a group: far more than a rollout device needs for it."""


def gradient_worker(name: str) -> WorkerJoined:
    return WorkerJoined(f"{name}-0", name, "rollout", can_train=True)


def computed(command: ComputeGradient, seconds: float = 2.0) -> GradientComputed:
    group = command.group
    return GradientComputed(
        batch=group.batch,
        group=group.group,
        attempt=group.attempt,
        policy=command.policy,
        contribution=GroupGradientRef(gradient=REF, tally={}, worker=command.worker),
        seconds=seconds,
    )


def trained(command: TrainGroup, seconds: float) -> GroupTrained:
    return GroupTrained(
        batch=command.batch, group=command.group, attempt=command.attempt, worker="trainer-0",
        seconds=seconds,
    )  # fmt: skip


def behind(*gradient_workers: str, **plan: Any) -> tuple[Machine, list[Command]]:
    """A machine whose trainer is slow, and what it has commanded when all groups are whole."""
    machine = Machine(num_groups=8, **plan)
    for event in (TRAINER, *(gradient_worker(name) for name in gradient_workers)):
        machine.handle(event)
    first = run(machine, machine.handle(examples.published(0)))
    slow = next(c for c in first if isinstance(c, TrainGroup))
    return machine, [*first, *machine.handle(trained(slow, BEHIND))]


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


def gradients(commands: list[Command]) -> list[ComputeGradient]:
    return [c for c in commands if isinstance(c, ComputeGradient)]


def groups(commands: list[Command]) -> list[TrainGroup]:
    return [c for c in commands if isinstance(c, TrainGroup)]


def test_without_devices_that_can_train_every_whole_group_goes_to_the_trainer_at_once() -> None:
    _, commands = behind()
    assert sorted(c.group for c in groups(commands)) == list(range(8))
    assert not gradients(commands)


def test_a_trainer_that_is_behind_has_a_few_groups_and_rollout_devices_take_others() -> None:
    _, commands = behind("h", "i")
    [probe] = gradients(commands)  # until one has shown what a gradient costs
    assert probe.policy == examples.published(0).policy
    assert len(groups(commands)) == 4  # three ahead, and one more for the one that was trained
    assert probe.group.group not in [c.group for c in groups(commands)]


def test_the_trainer_is_sent_the_group_with_its_gradient_and_others_are_shared() -> None:
    machine, commands = behind("h", "i")
    [probe] = gradients(commands)
    more = machine.handle(computed(probe))
    [added] = groups(more)
    assert added.group == probe.group.group
    assert added.contribution is not None and added.contribution.worker == probe.worker
    assert {c.worker for c in gradients(more)} == {"h-0", "i-0"}


def test_a_gradient_that_comes_twice_is_sent_once() -> None:
    machine, commands = behind("h")
    [probe] = gradients(commands)
    machine.handle(computed(probe))
    assert not groups(machine.handle(computed(probe)))


def test_a_lost_devices_group_goes_to_the_trainer_and_its_late_gradient_is_ignored() -> None:
    machine, commands = behind("h")
    [probe] = gradients(commands)
    sent = [c.group for c in groups(machine.handle(WorkerLeft("h-0")))]
    assert probe.group.group in sent
    assert not groups(machine.handle(computed(probe)))
    group = machine.state.batches[0].groups[probe.group.group]
    assert group.contribution is None and group.attempt == 1


def test_a_device_that_failed_computes_no_further_gradient() -> None:
    machine, commands = behind("h")
    [probe] = gradients(commands)
    released = GradientReleased(
        batch=0, group=probe.group.group, attempt=0, worker="h-0", reason="failed"
    )
    after = machine.handle(released)
    assert not gradients(after)
    assert probe.group.group in [c.group for c in groups(after)]


def test_a_gradient_that_the_trainer_cannot_read_is_computed_by_the_trainer() -> None:
    machine, commands = behind("h")
    [probe] = gradients(commands)
    machine.handle(computed(probe))
    index = probe.group.group
    failed = GroupFailed(batch=0, group=index, attempt=0, reason="no tensors")
    sent = [*machine.handle(failed)]
    while index not in [c.group for c in groups(sent)]:
        waiting = next(g for g in groups(machine.told) if g.group not in _trained(machine))  # type: ignore[arg-type]
        sent += machine.handle(trained(waiting, BEHIND))
    [again] = [c for c in groups(sent) if c.group == index]
    assert again.contribution is None and again.attempt == 1


def _trained(machine: Machine) -> list[int]:
    return [i for i, g in enumerate(machine.state.batches[0].groups) if g.trained_by]


def test_a_trainer_that_keeps_up_trains_every_group() -> None:
    machine = Machine(num_groups=8)
    for event in (TRAINER, gradient_worker("h")):
        machine.handle(event)
    commands = machine.handle(examples.published(0))
    while commands:
        assert not gradients(commands)
        command = commands.pop(0)
        if isinstance(command, GenerateFragment):
            commands += machine.handle(examples.generated(command))
            commands += machine.handle(examples.scored(command))
        elif isinstance(command, TrainGroup):
            commands += machine.handle(trained(command, 0.001))


def test_a_gradient_of_another_version_is_ignored() -> None:
    machine, commands = behind("h")
    [probe] = gradients(commands)
    wrong = computed(probe).model_copy(update={"policy": examples.published(1).policy})
    assert not groups(machine.handle(wrong))


def test_colocated_devices_generate_and_train_their_own_groups() -> None:
    machine = Machine(num_groups=4, mode="colocated")
    machine.handle(WorkerLeft("a-0"))
    for event in (WorkerJoined("t-0", "t", "trainer", concurrency=1), gradient_worker("h")):
        machine.handle(event)
    commands = machine.handle(_tag_all())
    commands += machine.handle(examples.published(0))
    lent = [c for c in commands if isinstance(c, SetDevice)]
    assert [c.mode for c in lent] == ["generate"]
    machine.handle(DeviceReported("t-0", lent[0].loan_number, "generate"))
    seen = run(machine, commands)
    owners = {(c.fragment.group, c.worker) for c in seen if isinstance(c, GenerateFragment)}
    assert owners == {(0, "h-0"), (1, "t-0"), (2, "h-0"), (3, "t-0")}
    assert sorted(c.group for c in groups(seen)) == [1, 3]
    [first] = gradients(seen)
    [second] = gradients(machine.handle(computed(first)))
    assert {first.group.group, second.group.group} == {0, 2}


def _tag_all() -> Any:
    from shared.messages.contracts import TagRequest

    return TagRequest(mode="fixed", groups=4, id="x")


def test_a_trainer_of_independent_devices_is_lent_until_its_share_is_generated() -> None:
    machine = Machine("a", num_groups=4)
    machine.handle(WorkerJoined("t-0", "t", "trainer", concurrency=2, independent_devices=True))
    machine.handle(_tag_all().model_copy(update={"groups": 2}))
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
