"""Permissions of members by `schedule.mode`: when they generate, and when they train."""

from typing import Literal

import pytest

from services.scheduler.core.inputs import Tick, WorkerJoined, WorkerLeft
from services.scheduler.core.waiting import standstill
from shared.messages.contracts import FragmentFailed, GenerateFragment, TagRequest, TrainGroup
from shared.messages.fluid import ExchangeSums, TrainPiece
from tests import examples
from tests.scheduler.core.test_fluid import Run

Mode = Literal["colocated", "sequential"]
MODES: tuple[Mode, ...] = ("colocated", "sequential")


def run_of(mode: Mode, *, members: int = 2) -> Run:
    """A run of members, beside a worker that only generates where members do not."""
    run = Run(members, mode=mode)
    if mode == "sequential":
        run.give(WorkerJoined("rollout-0-a", "rollout-0", "rollout"))
    return run


@pytest.mark.parametrize(("mode", "generating"), [
    ("colocated", {"trainer-0-a", "trainer-1-a"}),
    ("sequential", {"rollout-0-a"}),
])  # fmt: skip
def test_members_train_once_the_whole_batch_is_scored(mode: Mode, generating: set[str]) -> None:
    run, workers = run_of(mode), set[str]()
    while tasks := run.take(GenerateFragment):
        for task in tasks:
            assert not run.take(TrainGroup) and not run.take(TrainPiece)
            workers.add(task.worker)
            run.give(examples.generated(task), examples.scored(task))
    assert workers == generating
    assert [group.group for group in run.take(TrainGroup)] == [0, 1]
    run.train()
    [command] = run.take(ExchangeSums)
    assert {share.worker for share in command.shares} == {"trainer-0-a", "trainer-1-a"}


@pytest.mark.parametrize("mode", MODES)
def test_a_group_whose_samples_cannot_be_scored_holds_nothing_up(mode: Mode) -> None:
    run = run_of(mode)
    while tasks := run.take(GenerateFragment):
        for task in tasks:
            unscored = (None,) * task.fragment.num_samples
            rewards = (unscored,) if task.fragment.group == 0 else ()
            run.give(examples.generated(task), examples.scored(task, *rewards))
    dropped = {group.group: group.dropped is not None for group in run.take(TrainGroup)}
    assert dropped == {0: True, 1: False}
    run.train()
    assert len(run.take(ExchangeSums)) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_group_that_is_generated_again_is_trained_once_it_is_scored(mode: Mode) -> None:
    run = run_of(mode)
    [task, *_] = [each for each in run.commands if isinstance(each, GenerateFragment)]
    run.generate()
    run.take(TrainGroup)
    failed = FragmentFailed(slot=task.fragment.slot, stage="admission", reason="", worker=None)
    run.give(failed)
    assert run.take(TrainGroup) == []
    run.generate()
    assert [(each.group, each.attempt) for each in run.take(TrainGroup)] == [
        (task.fragment.group, 1)
    ]
    run.train()
    assert len(run.take(ExchangeSums)) == 1


@pytest.mark.parametrize("mode", MODES)
def test_members_that_wait_are_not_late(mode: Mode) -> None:
    run = run_of(mode)
    for _ in range(4000):
        run.give(Tick(), seconds=1.0)
        for task in run.take(GenerateFragment)[:1]:
            run.give(examples.generated(task), examples.scored(task))
    assert run.state.fluid is not None and run.state.fluid.out == frozenset()
    late = {each.address for each in run.state.workers.values() if each.excluded}
    assert mode == "colocated" or late <= {"rollout-0-a"}


def test_what_a_lost_colocated_member_had_is_generated_by_the_others() -> None:
    run = run_of("colocated")
    run.give(WorkerLeft("trainer-0-a"))
    run.generate()
    run.train()
    [command] = run.take(ExchangeSums)
    assert [share.worker for share in command.shares] == ["trainer-1-a"]


def test_without_a_worker_that_generates_an_alarm_names_the_fragments() -> None:
    run = run_of("sequential")
    run.take(GenerateFragment)
    run.give(WorkerLeft("rollout-0-a"))
    assert run.take(GenerateFragment) == []
    assert "fragments that no device is given: " in standstill(run.plan, run.state, 12.0)


def test_what_a_member_keeps_for_its_next_loan_takes_no_place_of_its_pieces() -> None:
    run = Run(0, mode="disaggregated", max_staleness=1, num_groups=3)
    run.give(TagRequest(mode="fixed", groups=1, id="x"))
    run.give(WorkerJoined("rollout-0-a", "rollout-0", "rollout", concurrency=1))
    run.join(0)
    tasks = run.take(GenerateFragment)
    kept = [task for task in tasks if task.worker == "trainer-0-a"]
    assert [task.fragment.group for task in kept] == [2, 2]
    for task in tasks:
        if task not in kept:
            run.give(examples.generated(task), examples.scored(task))
    assert run.state.workers["trainer-0-a"].assigned and run.take(TrainGroup)
    assert [piece.piece.group for piece in run.take(TrainPiece)] == [0]
