"""Devices that report and do not finish, or give everything back."""

from typing import Any

import pytest

from services.scheduler import limits
from services.scheduler.core.inputs import Tick, WorkerInactive, WorkerLeft
from shared.limits import DEADLINE_FACTOR, FIRST_DEADLINE_S, MIN_DEADLINE_S
from shared.messages.contracts import (
    FragmentReleased,
    GenerateFragment,
    OperatorRequest,
    TrainGroup,
)
from tests import examples
from tests.scheduler.core.machine_driver import Machine, joined

DEADLINE = {"slot_deadline_s": 10.0}


def machine_at_work(*workers: str, **plan: Any) -> tuple[Machine, list[GenerateFragment]]:
    machine = Machine(*workers, **{**DEADLINE, **plan})
    return machine, machine.tasks(examples.published(0))


def ticks(machine: Machine, seconds: float) -> list[GenerateFragment]:
    """Time passes a second at a time."""
    return [task for _ in range(int(seconds)) for task in machine.tasks(Tick())]


def generated(machine: Machine, task: GenerateFragment, seconds: float) -> None:
    done = examples.generated(task).model_copy(update={"seconds": seconds})
    machine.handle(done)


def test_work_past_its_deadline_is_given_to_another_device_as_well() -> None:
    machine, tasks = machine_at_work("a", "b", num_groups=2)
    stuck = [task for task in tasks if task.worker == "a-0"]
    for task in tasks:
        if task.worker == "b-0":
            generated(machine, task, 1.0)
    again = ticks(machine, 12)
    assert [(t.fragment, t.worker) for t in again] == [(t.fragment, "b-0") for t in stuck]
    assert machine.state.workers["a-0"].excluded == "late"


def test_the_first_result_counts_whoever_is_first() -> None:
    machine, tasks = machine_at_work("a", "b", num_groups=1, fragment_size=4)
    [first] = tasks
    other = "b-0" if first.worker == "a-0" else "a-0"
    [again] = ticks(machine, 13)
    assert (again.fragment, again.worker) == (first.fragment, other)
    generated(machine, first, 12.0)
    [train] = machine.handle(examples.scored(first))
    assert isinstance(train, TrainGroup)
    assert train.fragments[0].generated_by == first.worker, "the record names the one that counted"
    assert machine.handle(examples.scored(again)) == []
    assert machine.state.workers[first.worker].excluded is None


def test_a_device_past_its_deadline_is_given_nothing_until_it_finishes_something() -> None:
    machine, tasks = machine_at_work("a", num_groups=3)
    assert ticks(machine, 12) == []
    assert machine.tasks(joined("b")) != []
    assert {t.worker for t in ticks(machine, 3)} <= {"b-0"}
    more = machine.tasks(examples.generated(tasks[0]))
    assert machine.state.workers["a-0"].excluded is None
    assert "a-0" in {task.worker for task in more}


def test_a_late_device_gets_work_again_once_it_is_idle() -> None:
    """Its result has come second, so that nobody has heard of it."""
    machine, tasks = machine_at_work("a", num_groups=3)
    ticks(machine, 12)
    again = machine.tasks(WorkerInactive("a-0", "nothing"))
    assert [t.fragment.attempt for t in again] == [1, 1]
    assert [t.fragment.first_sample for t in again] == [t.fragment.first_sample for t in tasks]


def test_loading_and_compiling_do_not_count_towards_a_deadline() -> None:
    machine, _ = machine_at_work("a", "b")
    for _ in range(30):
        machine.handle(WorkerInactive("a-0", "loading"))
        machine.handle(Tick())
    assert machine.state.workers["a-0"].excluded is None
    assert machine.state.workers["b-0"].excluded == "late"


def test_a_device_that_loads_for_ten_deadlines_is_late() -> None:
    """It hangs there: what it was given would wait for ever."""
    machine, _ = machine_at_work("a", "b", num_groups=3)
    excluded = []
    for _ in range(70):  # of two seconds each
        machine.handle(WorkerInactive("a-0", "loading"))
        machine.handle(Tick())
        excluded.append(machine.state.workers["a-0"].excluded)
    first = excluded.index("late")
    assert 50 <= first <= 56
    assert set(excluded[first:]) == {"late"}


def test_the_time_in_which_the_scheduler_stood_still_does_not_count() -> None:
    machine, _ = machine_at_work("a", "b")
    ticks(machine, 5)
    machine.now += 1000.0
    assert machine.tasks(Tick()) == []
    assert ticks(machine, 9) == []


@pytest.mark.parametrize(
    ("seconds", "deadline"), [(1.0, MIN_DEADLINE_S), (50.0, DEADLINE_FACTOR * 100)]
)
def test_the_deadline_is_ten_times_what_the_device_took_before(
    seconds: float, deadline: float
) -> None:
    """``seconds`` per sample, in fragments of two."""
    machine, tasks = machine_at_work("a", "b", num_groups=9, slot_deadline_s="auto")
    mine = [task for task in tasks if task.worker == "a-0"]
    generated(machine, mine[0], 2 * seconds)
    ticks(machine, deadline - 5)
    assert machine.state.workers["a-0"].excluded is None
    ticks(machine, 10)
    assert machine.state.workers["a-0"].excluded == "late"
    ticks(machine, FIRST_DEADLINE_S - deadline - 60)
    assert machine.state.workers["b-0"].excluded is None, "it has not finished anything yet"
    ticks(machine, 120)
    assert machine.state.workers["b-0"].excluded == "late"


def return_fragments(machine: Machine, times: int) -> list[GenerateFragment]:
    """Device a gives back whatever it is given."""
    tasks: list[GenerateFragment] = []
    for _ in range(times):
        held = machine.state.workers["a-0"].assigned
        if not held:
            break
        event = FragmentReleased(slot=held[0].slot, worker="a-0", reason="stale")
        tasks += machine.tasks(event)
    return tasks


def test_a_device_that_returns_everything_is_soon_excluded() -> None:
    machine, _ = machine_at_work("a", "b", num_groups=3)
    tasks = return_fragments(machine, 1000)
    assert len(tasks) < 2 * machine.plan.max_returns
    assert machine.state.workers["a-0"].excluded == "returns"
    assert machine.state.phase == "running"
    for task in machine.tasks(examples.published(1)):
        assert task.fragment.batch == 1
    assert machine.state.workers["a-0"].excluded is None, "it may have been right"


def test_a_run_fails_with_the_reason_if_all_devices_return_everything() -> None:
    machine, _ = machine_at_work("a", num_groups=3)
    assert len(return_fragments(machine, 1000)) < 2 * machine.plan.max_returns
    ticks(machine, limits.ALL_RETURN_S + 2)
    assert machine.state.phase == "failed"
    assert machine.state.failure is not None and "return whatever" in machine.state.failure
    assert machine.tasks(OperatorRequest(action="resume", id="x")) != []


def test_rightful_returns_are_not_counted() -> None:
    """Fragments of a version that is superseded, and those that a device finishes in between."""
    machine, tasks = machine_at_work("a", num_groups=40, max_returns=2)
    for _ in range(6):
        [first, *_] = machine.state.workers["a-0"].assigned
        machine.handle(FragmentReleased(slot=first.slot, worker="a-0", reason="stale"))
        held = machine.state.workers["a-0"].assigned[0].slot
        task = next(t for t in reversed(machine.told) if isinstance(t, GenerateFragment)
                    and t.fragment.slot == held)  # fmt: skip
        machine.handle(examples.generated(task))
    assert machine.state.workers["a-0"].excluded is None
    assert tasks


def test_a_device_that_is_about_to_end_is_given_nothing_more() -> None:
    machine, tasks = machine_at_work("a", num_groups=3)
    event = FragmentReleased(slot=tasks[0].fragment.slot, worker="a-0", reason="draining")
    assert machine.tasks(event) == []
    assert machine.tasks(joined("a", life=1)) != []


def test_a_fragment_that_kills_workers_fails_the_run() -> None:
    machine = Machine("a", num_groups=1)
    machine.handle(examples.published(0))
    for life in range(machine.plan.max_losses):
        machine.handle(WorkerLeft(f"a-{life}"))
        machine.handle(joined("a", life=life + 1))
    assert machine.state.phase == "failed"
    assert machine.state.failure is not None and "was lost with 5 workers" in machine.state.failure


def test_a_fragment_that_only_waited_for_the_workers_that_died_is_not_what_killed_them() -> None:
    machine = Machine("a", "b", num_groups=2)
    machine.handle(examples.published(0))
    for life in range(machine.plan.max_losses - 1):
        machine.handle(WorkerLeft(f"a-{life}"))
        machine.handle(joined("a", life=life + 1))
    losses = [f.num_losses for g in machine.state.batches[0].groups for f in g.fragments]
    assert machine.state.phase == "running"
    assert sum(losses) == machine.plan.max_losses - 1
