"""What devices lose or refuse is done again, under another attempt where it has to be."""

from collections.abc import Callable

import pytest

from services.scheduler.core.inputs import MachineInput, WorkerLeft
from shared.messages.contracts import (
    FragmentFailed,
    FragmentReleased,
    GenerateFragment,
    GroupFailed,
    OperatorRequest,
    TrainGroup,
)
from tests import examples
from tests.scheduler.core.machine_driver import Machine, joined


def test_a_failed_fragment_gets_another_attempt_and_the_old_one_counts_no_more() -> None:
    machine = Machine(num_groups=1)
    first, second = machine.tasks(examples.published(0))
    [again] = machine.tasks(
        FragmentFailed(slot=first.fragment.slot, stage="rollout", reason="oom", worker=first.worker)
    )
    assert again.fragment.attempt == 1
    assert machine.handle(examples.scored(first)) == []
    machine.handle(examples.scored(second))
    [train] = machine.handle(examples.scored(again))
    assert isinstance(train, TrainGroup)
    assert [f.fragment.attempt for f in train.fragments] == [1, 0]


def test_a_fragment_that_keeps_failing_fails_the_run_with_the_reason() -> None:
    machine = Machine(num_groups=1)
    [task, _] = machine.tasks(examples.published(0))
    for _ in range(machine.plan.max_attempts):
        failed = FragmentFailed(
            slot=task.fragment.slot, stage="reward", reason="no digit", worker=None
        )
        tasks = machine.tasks(failed)
        task = tasks[0] if tasks else task
    assert machine.state.phase == "failed"
    assert machine.state.failure is not None and "no digit" in machine.state.failure
    [task, *_] = machine.tasks(OperatorRequest(action="resume", id="x"))
    again = FragmentFailed(slot=task.fragment.slot, stage="reward", reason="no digit", worker=None)
    assert machine.tasks(again) != [], "after a resume it has all its attempts again"


def test_a_refused_fragment_sends_its_group_again() -> None:
    machine = Machine(num_groups=1)
    tasks = machine.tasks(examples.published(0))
    [train] = machine.finish(list(tasks))
    refused = FragmentFailed(
        slot=tasks[0].fragment.slot, stage="admission", reason="weights", worker=None
    )
    [again] = machine.finish(machine.tasks(refused))
    assert (train.attempt, again.attempt) == (0, 1)
    assert again.fragments[0].fragment.attempt == 1
    assert again.fragments[1] == train.fragments[1]


def test_a_group_whose_slot_is_poisoned_is_sent_under_the_next_attempt() -> None:
    machine = Machine(num_groups=1)
    [train] = machine.finish(machine.tasks(examples.published(0)))
    [again] = machine.handle(GroupFailed(batch=0, group=0, attempt=0, reason="poisoned"))
    assert isinstance(again, TrainGroup)
    assert again.attempt == train.attempt + 1
    assert machine.handle(GroupFailed(batch=0, group=0, attempt=0, reason="poisoned")) == []


@pytest.mark.parametrize("report", [examples.generated, examples.scored])
def test_a_slot_that_was_taken_before_it_was_given_to_anybody_is_passed_over(
    report: Callable[[GenerateFragment], MachineInput],
) -> None:
    machine = Machine(num_groups=2)
    one, two, *_ = Machine(num_groups=2).tasks(examples.published(0))
    machine.handle(WorkerLeft("a-0"))
    assert machine.tasks(examples.published(0)) == []
    machine.handle(report(one))
    machine.handle(report(one))
    tasks = machine.tasks(joined("b"))
    assert [task.fragment.attempt for task in tasks[:2]] == [1, 1]
    assert machine.tasks(report(two)) == [], "this attempt is over"
    for task in tasks:
        machine.finish([task])
    assert machine.state.batch is not None
    assert [group.sent for group in machine.state.batch.groups] == [True, True]


def test_what_a_lost_worker_had_goes_to_another_at_once() -> None:
    machine = Machine("a", "b", num_groups=2)
    first = machine.tasks(examples.published(0))
    lost = [task for task in first if task.worker == "a-0"]
    again = machine.tasks(WorkerLeft("a-0"))
    done = [task for task in first if task.worker == "b-0"]
    again += machine.tasks(examples.generated(done[0])) + machine.tasks(examples.generated(done[1]))
    assert [task.fragment for task in again] == [task.fragment for task in lost]
    assert {task.worker for task in again} == {"b-0"}


def test_a_worker_that_is_started_again_is_another_one() -> None:
    machine = Machine("a", num_groups=1)
    first = machine.tasks(examples.published(0))
    again = machine.tasks(joined("a", life=1))
    assert [task.fragment for task in again] == [task.fragment for task in first]
    assert {task.worker for task in again} == {"a-1"}


def test_a_device_is_free_when_another_one_has_done_its_fragment() -> None:
    """Its own result is refused: the slot is taken, and nothing will be heard of it."""
    machine = Machine("a", "b", num_groups=3, queue_depth=1)
    first, second = machine.tasks(examples.published(0))
    machine.handle(WorkerLeft("a-0"))
    [again] = machine.tasks(examples.generated(second))
    assert (again.fragment, again.worker) == (first.fragment, "b-0")
    [following] = machine.tasks(examples.generated(first))
    assert following.worker == "b-0"
    assert following.fragment != again.fragment


def test_what_a_lost_device_gives_back_is_given_to_it_again_under_another_attempt() -> None:
    machine = Machine("a", num_groups=1)
    first, second = machine.tasks(examples.published(0))
    machine.handle(WorkerLeft("a-0"))
    machine.handle(FragmentReleased(slot=first.fragment.slot, worker="a-0", reason="draining"))
    again = machine.tasks(joined("a"))
    assert [task.fragment.attempt for task in again] == [1, 0]
    assert again[1].fragment == second.fragment  # which it still has


def test_what_a_lost_device_gave_back_while_another_one_had_it_gets_another_attempt() -> None:
    machine = Machine("a", "b", num_groups=1, queue_depth=1)
    first, second = machine.tasks(examples.published(0))
    machine.handle(examples.generated(second))
    [to_b] = machine.tasks(WorkerLeft("a-0"))
    assert (to_b.fragment, to_b.worker) == (first.fragment, "b-0")
    machine.handle(FragmentReleased(slot=first.fragment.slot, worker="a-0", reason="stale"))
    machine.handle(joined("a"))
    [to_a] = machine.tasks(WorkerLeft("b-0"))
    assert (to_a.worker, to_a.fragment.attempt) == ("a-0", 1)
