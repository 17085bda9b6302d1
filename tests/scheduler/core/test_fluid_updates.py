"""Several updates per batch in the pure core: their parts, what they wait for, and what is lost."""

import pytest

from services.scheduler.core.fluid.events import MemberReported
from services.scheduler.core.inputs import Tick, WorkerLeft
from shared.messages.contracts import FragmentFailed, GenerateFragment
from shared.messages.fluid import BeginAgain, ExchangeSums, Stepped, TakeStep, TrainPiece
from shared.messages.workers import Holds
from tests import examples
from tests.scheduler.core.test_fluid import CHECKSUM, Run, held, trained

INNER = "1" * 32


def exchanged(run: Run) -> ExchangeSums:
    run.train()
    [command] = run.take(ExchangeSums)
    assert isinstance(command, ExchangeSums)
    return command


def take_step(run: Run, command: ExchangeSums) -> TakeStep:
    for share in command.shares:
        run.give(held(command, share.worker))
    [step] = run.take(TakeStep)
    assert isinstance(step, TakeStep)
    return step


def take_update(run: Run, command: ExchangeSums) -> None:
    """Have all members take the first update."""
    step = take_step(run, command)
    for share in command.shares:
        run.give(
            Stepped(
                batch=0, attempt=step.attempt, update=0, worker=share.worker,
                policy=examples.policy(0), checksum=INNER, is_reference=False, seconds=0.0,
            )
        )  # fmt: skip


def groups_of(command: ExchangeSums) -> set[int]:
    return {piece.group for share in command.shares for piece in share.pieces}


def test_each_update_is_an_exchange_of_its_groups_and_only_the_last_opens_the_next_batch() -> None:
    run = Run(updates=2)
    run.generate()
    first = exchanged(run)
    assert (first.update, groups_of(first)) == (0, {0})
    take_update(run, first)
    assert run.take(GenerateFragment) == []
    pieces = run.take(TrainPiece)
    assert {(each.update, each.piece.group) for each in pieces} == {(1, 1)}
    run.commands += pieces
    second = exchanged(run)
    assert (second.update, groups_of(second), second.round) == (1, {1}, 1)
    step = take_step(run, second)
    for share in second.shares:
        run.give(
            Stepped(
                batch=0, attempt=0, update=1, worker=share.worker, policy=examples.policy(1),
                checksum=CHECKSUM, is_reference=False, seconds=0.0,
            )
        )  # fmt: skip
    assert step.update == 1
    assert {each.fragment.batch for each in run.take(GenerateFragment)} == {1}


def test_no_update_replaces_the_version_that_generates_before_its_last_fragment() -> None:
    for max_staleness, ranks, num_exchanges in ((0, 1, 0), (1, 1, 1), (1, 2, 0)):
        run = Run(updates=2, ranks=ranks, max_staleness=max_staleness)
        while tasks := [t for t in run.take(GenerateFragment) if t.fragment.group == 0]:
            for task in tasks:
                run.give(examples.generated(task), examples.scored(task))
        run.train()
        assert len(run.take(ExchangeSums)) == num_exchanges


@pytest.mark.parametrize(("max_staleness", "ranks"), [(0, 1), (1, 2)])
def test_a_group_that_fails_after_an_update_has_the_batch_begin_again(
    max_staleness: int, ranks: int
) -> None:
    run = Run(updates=2, ranks=ranks, max_staleness=max_staleness)
    tasks = list(run.take(GenerateFragment))
    run.commands += tasks
    run.generate()
    take_update(run, exchanged(run))
    run.give(trained(run.take(TrainPiece)[0]))
    run.take(TrainPiece)
    [slot] = {
        t.fragment.slot for t in tasks if t.fragment.group == 1 and not t.fragment.first_sample
    }
    run.give(FragmentFailed(slot=slot, stage="admission", reason="broken", worker=None))
    assert [each.attempt for each in run.take(BeginAgain)] == [1]
    run.generate()
    assert run.take(TrainPiece) == []  # nobody has the version any more
    for number in range(2):
        run.give(
            MemberReported(
                f"trainer-{number}-a", Holds(version=0, checksum=CHECKSUM, update=0, sum_bytes=0)
            )
        )
    again = exchanged(run)
    assert (again.attempt, again.update, groups_of(again)) == (1, 0, {0})


def test_a_batch_begins_again_when_all_that_had_taken_an_update_are_lost() -> None:
    run = Run(updates=2)
    run.generate()
    take_update(run, exchanged(run))
    run.join(2)
    run.give(WorkerLeft("trainer-0-a"), WorkerLeft("trainer-1-a"))
    assert run.take(BeginAgain) == []
    run.give(Tick(), seconds=6.0)
    assert [each.attempt for each in run.take(BeginAgain)] == [1]
    again = exchanged(run)
    assert {share.worker for share in again.shares} == {"trainer-2-a"}
    assert (again.attempt, again.update, groups_of(again)) == (1, 0, {0})
