"""Samples that could not be scored."""

import pytest

from shared.messages.contracts import GenerateFragment, OperatorRequest, TrainGroup
from tests import examples
from tests.scheduler.core.machine_driver import Machine


def scored_as(machine: Machine, *rewards: float | None) -> list[TrainGroup]:
    """Every fragment of a batch, its samples scored as the first ones of a group."""
    trained: list[TrainGroup] = []
    tasks = machine.tasks(examples.published(0))
    while tasks:
        task = tasks.pop(0)
        given = tuple(rewards[sample] for sample in task.fragment.samples)
        for event in (examples.generated(task), examples.scored(task, given)):
            for command in machine.handle(event):
                if isinstance(command, TrainGroup):
                    trained.append(command)
                elif isinstance(command, GenerateFragment):
                    tasks.append(command)
    return trained


def test_a_sample_without_a_score_teaches_nothing_and_the_others_do() -> None:
    machine = Machine(num_groups=2)
    trained = scored_as(machine, 1.0, None, 3.0, 2.0)
    assert len(trained) == 2 and machine.state.phase == "running"
    for train in trained:
        a, failed, c, d = train.advantages
        assert (failed, train.dropped) == (0.0, None)
        assert (a, c, d) == pytest.approx((-1.2247, 1.2247, 0.0), abs=1e-3)


def test_a_group_that_loses_too_many_samples_is_dropped_with_the_reason() -> None:
    machine = Machine(num_groups=2)
    first, *others = machine.tasks(examples.published(0))
    tasks, trained = [first, *others], list[TrainGroup]()
    while tasks:
        task = tasks.pop(0)
        is_broken = task.fragment.group == 0
        rewards = (None, None) if is_broken else (1.0, 2.0)
        for event in (examples.generated(task), examples.scored(task, rewards)):
            for command in machine.handle(event):
                if isinstance(command, TrainGroup):
                    trained.append(command)
                elif isinstance(command, GenerateFragment):
                    tasks.append(command)
        assert machine.state.phase == "running"
    dropped = next(train for train in trained if train.group == 0)
    assert dropped.dropped == "4 of 4 samples could not be scored"
    assert dropped.advantages == (0.0,) * 4


def test_a_batch_of_which_every_group_is_dropped_fails_the_run() -> None:
    machine = Machine(num_groups=2)
    scored_as(machine, 1.0, None, None, None)
    assert machine.state.phase == "failed"
    assert machine.state.failure == "batch 0: too few of its samples could be scored"
    assert not [told for told in machine.told if isinstance(told, TrainGroup)]


def test_a_batch_that_could_not_be_scored_is_generated_again_when_the_run_goes_on() -> None:
    machine = Machine(num_groups=2)
    scored_as(machine, 1.0, None, None, None)
    tasks = machine.tasks(OperatorRequest(action="resume", id="1"))
    assert (machine.state.phase, machine.state.failure) == ("running", None)
    assert {task.fragment.attempt for task in tasks} == {1}
    trained = machine.finish(tasks)
    assert [train.dropped for train in trained] == [None, None]
    assert all(reward is not None for train in trained for reward in train.fragments[0].rewards)
