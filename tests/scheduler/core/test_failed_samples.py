"""Samples that could not be scored."""

from typing import Any

import pytest

from services.scheduler.core.inputs import RecoveryDone
from services.scheduler.core.state import State
from shared.messages.contracts import (
    Command,
    FragmentFailed,
    FragmentGenerated,
    FragmentScored,
    GenerateFragment,
    GroupRequest,
    OperatorRequest,
    TrainGroup,
)
from tests import examples
from tests.scheduler.core.machine_driver import Machine, joined


def scored_as(machine: Machine, *rewards: float | None) -> list[TrainGroup]:
    """Every fragment of a batch, its samples scored as the first ones of a group."""
    tasks = machine.tasks(examples.published(0))
    return machine.finish(tasks, lambda each: tuple(rewards[sample] for sample in each.samples))


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
    tasks = machine.tasks(examples.published(0))
    trained = machine.finish(tasks, lambda each: (1.0, 2.0) if each.group else (None, None))
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


def paused_with_a_failed_group(**plan: Any) -> tuple[Machine, list[TrainGroup]]:
    """A run that was paused when all its fragments were issued, and then scored: no sample of group
    0 could be. Returns also the groups that were given to be trained since."""
    machine = Machine("a", "b", "c", "d", num_groups=2, **plan)
    tasks = machine.tasks(examples.published(0))
    assert len(tasks) == 4
    machine.handle(OperatorRequest(action="pause", id="1"))
    trained = [command for task in tasks for command in scored_if_not_broken(machine, task)]
    return machine, [command for command in trained if isinstance(command, TrainGroup)]


def scored_if_not_broken(machine: Machine, task: GenerateFragment) -> list[Command]:
    rewards = (None, None) if task.fragment.group == 0 else (1.0, 2.0)
    machine.handle(examples.generated(task))
    return machine.handle(examples.scored(task, rewards))


def test_what_cannot_be_scored_while_the_run_is_paused_waits_for_a_mend() -> None:
    machine, trained = paused_with_a_failed_group()
    assert [train.group for train in trained] == [1]
    assert machine.tasks(GroupRequest(action="again", batch=0, group=0, id="2")) == []
    tasks = machine.tasks(OperatorRequest(action="resume", id="3"))
    assert {(task.fragment.group, task.fragment.attempt) for task in tasks} == {(0, 1)}
    [again] = machine.finish(tasks)
    assert (again.group, again.dropped) == (0, None)
    assert all(reward is not None for part in again.fragments for reward in part.rewards)


def test_a_group_that_is_dropped_is_given_last_so_that_there_is_time_for_a_mend() -> None:
    machine = Machine("a", "b", "c", "d", num_groups=3)
    tasks = sorted(machine.tasks(examples.published(0)), key=lambda task: task.fragment.group)
    trained = list[TrainGroup]()
    while tasks:
        told = scored_if_not_broken(machine, tasks.pop(0))
        tasks += [each for each in told if isinstance(each, GenerateFragment)]
        trained += [each for each in told if isinstance(each, TrainGroup)]
        if len(trained) == 1:
            assert not machine.state.batches[0].groups[0].sent
    assert [(train.group, train.dropped is None) for train in trained] == [
        (1, True), (2, True), (0, False),
    ]  # fmt: skip


def test_in_deterministic_mode_a_dropped_group_is_not_kept_back() -> None:
    """The trainer takes groups in their order there, and would wait for it."""
    machine = Machine("a", "b", "c", "d", num_groups=3, deterministic=True)
    tasks = sorted(machine.tasks(examples.published(0)), key=lambda task: task.fragment.group)
    sent = [each for task in tasks for each in scored_if_not_broken(machine, task)]
    assert [each.group for each in sent if isinstance(each, TrainGroup)] == [0, 1, 2]


def test_a_scheduler_that_is_started_again_while_the_run_is_paused_knows_of_the_retry() -> None:
    machine, _ = paused_with_a_failed_group()
    machine.handle(GroupRequest(action="again", batch=0, group=0, id="2"))
    told, again = machine.told, Machine("a", "b", "c", "d", num_groups=2)
    again.state = State(recovering=True)
    again.handle(examples.published(0))
    read_back = (GenerateFragment | TrainGroup, FragmentGenerated, FragmentScored)
    for kind in (*read_back, OperatorRequest | GroupRequest):
        for message in (each for each in told if isinstance(each, kind)):
            assert again.handle(message) == []
    for name in ("a", "b", "c", "d"):
        again.handle(joined(name))
    assert again.handle(RecoveryDone()) == [] and again.state.phase == "paused"
    tasks = again.tasks(OperatorRequest(action="resume", id="3"))
    assert {(task.fragment.group, task.fragment.attempt) for task in tasks} == {(0, 1)}


def test_without_a_request_it_counts_as_unscored_when_the_run_is_resumed() -> None:
    machine, _ = paused_with_a_failed_group()
    [dropped] = machine.handle(OperatorRequest(action="resume", id="2"))
    assert isinstance(dropped, TrainGroup)
    assert (dropped.group, dropped.dropped) == (0, "4 of 4 samples could not be scored")


def test_a_group_that_was_given_to_be_trained_is_not_generated_again() -> None:
    machine, _ = paused_with_a_failed_group()
    machine.handle(OperatorRequest(action="resume", id="2"))
    for group in (0, 1, 7):
        before = machine.state
        machine.handle(GroupRequest(action="again", batch=0, group=group, id="3"))
        assert machine.state.batches == before.batches
    assert not machine.handle(GroupRequest(action="again", batch=5, group=0, id="4"))


def test_only_what_could_not_be_scored_is_generated_again() -> None:
    machine = Machine("a", "b", "c", "d", num_groups=2)
    tasks = machine.tasks(examples.published(0))
    machine.handle(OperatorRequest(action="pause", id="1"))
    for task in tasks:
        broken = (task.fragment.group, task.fragment.first_sample) == (0, 2)
        machine.handle(examples.generated(task))
        machine.handle(examples.scored(task, (1.0, None) if broken else (1.0, 2.0)))
    machine.handle(GroupRequest(action="again", batch=0, group=0, id="2"))
    [task] = machine.tasks(OperatorRequest(action="resume", id="3"))
    assert (task.fragment.first_sample, task.fragment.attempt) == (2, 1)


def test_a_request_gives_a_fragment_that_failed_all_its_attempts_again() -> None:
    machine = Machine("a", num_groups=2)
    first = machine.tasks(examples.published(0))[0]
    for attempt in range(2):
        slot = first.fragment.slot.model_copy(update={"attempt": attempt})
        machine.handle(FragmentFailed(slot=slot, stage="reward", reason="no", worker=None))
    machine.handle(GroupRequest(action="again", batch=0, group=first.fragment.group, id="2"))
    failed = [each.num_failures for each in machine.state.batches[0].groups[0].fragments]
    assert machine.state.phase == "running" and set(failed) == {0}


def pause_at_failure(machine: Machine, number: str = "9") -> None:
    machine.handle(OperatorRequest(action="pause_at_failure", id=number))


def test_a_run_is_paused_when_samples_cannot_be_scored_if_operators_want_that() -> None:
    machine = Machine("a", "b", "c", "d", num_groups=3)
    tasks = sorted(machine.tasks(examples.published(0)), key=lambda task: -task.fragment.group)
    pause_at_failure(machine)
    while machine.state.phase == "running":
        assert machine.state.pause_at_failure
        told = scored_if_not_broken(machine, tasks.pop(0))
        tasks += [each for each in told if isinstance(each, GenerateFragment)]
    assert (machine.state.phase, machine.state.pause_at_failure) == ("paused", False)
    machine.handle(GroupRequest(action="again", batch=0, group=0, id="2"))
    tasks += machine.tasks(OperatorRequest(action="resume", id="3"))
    trained = machine.finish(tasks)
    assert {each.group: each.dropped for each in trained}[0] is None


def test_a_pause_at_a_failure_comes_at_once_if_something_has_failed() -> None:
    machine = Machine("a", "b", "c", "d", num_groups=3)
    tasks = sorted(machine.tasks(examples.published(0)), key=lambda task: task.fragment.group)
    for task in tasks[:2]:
        scored_if_not_broken(machine, task)
    before = machine.state.phase
    pause_at_failure(machine)
    assert (before, machine.state.phase) == ("running", "paused")


def test_a_pause_at_a_failure_is_called_off_by_resume_and_kept_by_a_paused_run() -> None:
    machine = Machine("a", "b", num_groups=2)
    machine.handle(examples.published(0))
    pause_at_failure(machine)
    machine.handle(OperatorRequest(action="resume", id="1"))
    assert (machine.state.phase, machine.state.pause_at_failure) == ("running", False)
    machine.handle(OperatorRequest(action="pause", id="2"))
    pause_at_failure(machine)
    assert machine.state.phase == "paused"
    machine.handle(OperatorRequest(action="resume", id="3"))
    assert (machine.state.phase, machine.state.pause_at_failure) == ("running", True)
    machine.handle(OperatorRequest(action="stop", id="4"))
    assert not machine.state.pause_at_failure


def test_what_is_retried_without_a_mend_pauses_the_run_again() -> None:
    machine, _ = paused_with_a_failed_group()
    machine.handle(GroupRequest(action="again", batch=0, group=0, id="2"))
    tasks = machine.tasks(OperatorRequest(action="resume", id="3"))
    for task in tasks:
        scored_if_not_broken(machine, task)
    assert machine.state.phase == "paused" and not machine.state.watched
    assert not machine.state.batches[0].groups[0].sent, "it can be retried once more"
    machine.handle(GroupRequest(action="again", batch=0, group=0, id="4"))
    [again] = machine.finish(machine.tasks(OperatorRequest(action="resume", id="5")))
    assert (again.group, again.dropped, machine.state.phase) == (0, None, "running")
    machine.handle(examples.published(1))
    assert not machine.state.watched


def failed_once(machine: Machine, task: GenerateFragment) -> list[Command]:
    return machine.handle(
        FragmentFailed(slot=task.fragment.slot, stage="reward", reason="no", worker=None)
    )


def test_a_run_is_paused_at_the_first_attempt_that_fails_and_a_mend_saves_its_work() -> None:
    machine = Machine("a", "b", "c", "d", num_groups=2)
    first, *others = machine.tasks(examples.published(0))
    pause_at_failure(machine)
    assert failed_once(machine, first) == [] and machine.state.phase == "paused"
    machine.handle(GroupRequest(action="again", batch=0, group=first.fragment.group, id="1"))
    tasks = machine.tasks(OperatorRequest(action="resume", id="2"))
    assert [task.fragment.attempt for task in tasks] == [1]
    assert failed_once(machine, tasks[0]) == [] and machine.state.phase == "paused", "no mend"
    tasks = machine.tasks(OperatorRequest(action="resume", id="3"))
    trained = machine.finish([*others, *tasks])
    assert [train.dropped for train in trained] == [None, None]


def test_a_run_that_goes_on_until_the_next_failure_is_not_paused_by_an_earlier_one() -> None:
    machine = Machine("a", "b", "c", "d", num_groups=2)
    first, second, *_ = machine.tasks(examples.published(0))
    machine.handle(OperatorRequest(action="pause", id="1"))
    failed_once(machine, first)
    pause_at_failure(machine)
    machine.handle(OperatorRequest(action="resume", id="2"))
    assert (machine.state.phase, machine.state.pause_at_failure) == ("running", True)
    failed_once(machine, second)
    assert machine.state.phase == "paused"


def test_what_failed_and_is_done_since_pauses_no_run() -> None:
    machine = Machine("a", num_groups=2)
    [task] = machine.tasks(examples.published(0))[:1]
    told = failed_once(machine, task)
    assert told
    for again in told:
        assert isinstance(again, GenerateFragment)
        machine.handle(examples.generated(again))
        machine.handle(examples.scored(again))
    pause_at_failure(machine)
    assert machine.state.phase == "running"
