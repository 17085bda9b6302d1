"""A result counts from a worker that was given this attempt at the work, and from nobody else."""

import pytest

from services.scheduler.core.inputs import WorkerLeft
from services.scheduler.core.state import FragmentState, State
from shared.messages.contracts import (
    Event,
    FragmentFailed,
    FragmentReleased,
    GenerateFragment,
    TrainGroup,
)
from tests import examples
from tests.scheduler.core.machine_driver import Machine

OTHERS = ("rogue-0", "b-0")
"""Somebody who is no worker, and a worker that was given something else."""


def results(task: GenerateFragment, name: str) -> list[Event]:
    slot = task.fragment.slot
    by_name = {"worker": name}
    return [
        examples.generated(task).model_copy(update=by_name),
        examples.scored(task).model_copy(update={"generated_by": name}),
        FragmentReleased(slot=slot, worker=name, reason="returned"),
        FragmentFailed(slot=slot, stage="rollout", reason="forged", worker=name),
        FragmentFailed(slot=slot, stage="rollout", reason="forged", worker=None),
        FragmentFailed(slot=slot, stage="delivery", reason="forged", worker=name),
    ]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", range(6))
@pytest.mark.parametrize("stage", ["issued", "generated", "lost"])
def test_what_a_worker_says_of_work_that_it_was_not_given_changes_nothing(
    name: str, kind: int, stage: str
) -> None:
    machine = Machine("a", "b", num_groups=2)
    task = next(each for each in machine.tasks(examples.published(0)) if each.worker == "a-0")
    if stage == "generated":
        machine.handle(examples.generated(task))
    if stage == "lost":
        machine.handle(WorkerLeft("a-0"))
    given = {address for _, address in fragment_of(machine.state, task).given}
    if name in given:  # it was given to the other one when the first was lost
        return
    before: State = machine.state
    assert machine.handle(results(task, name)[kind]) == []
    assert machine.state == before


def fragment_of(state: State, task: GenerateFragment) -> FragmentState:
    found = state.find_fragment(task.fragment.slot)
    assert found is not None
    return found


def test_a_worker_whose_lease_has_lapsed_may_have_done_what_it_was_given() -> None:
    machine = Machine("a", "b", num_groups=1, queue_depth=1)
    first, second = machine.tasks(examples.published(0))
    machine.handle(examples.generated(second))
    [to_b] = machine.tasks(WorkerLeft("a-0"))
    assert (to_b.worker, to_b.fragment) == ("b-0", first.fragment)
    machine.handle(examples.generated(first))
    assert fragment_of(machine.state, first).stage == "generated"
    machine.handle(examples.scored(second))
    [train] = machine.handle(examples.scored(first))
    assert isinstance(train, TrainGroup)
    assert [each.generated_by for each in train.fragments] == ["a-0", "b-0"]
