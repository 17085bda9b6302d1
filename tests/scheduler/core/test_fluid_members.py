"""Members in the pure core that are lost, come late, or report an earlier version."""

from services.scheduler.core.fluid.events import MemberReported
from services.scheduler.core.inputs import WorkerJoined, WorkerLeft
from shared.messages.fluid import CommitVersion, ExchangeSums, TrainPiece
from tests import examples
from tests.scheduler.core.test_fluid import Run, holds


def test_another_member_commits_if_the_committer_is_lost() -> None:
    run = Run()
    _, order = run.stepped()
    run.give(WorkerLeft(order.committer))
    [named] = run.take(CommitVersion)
    assert named.worker != order.committer


def test_if_all_that_have_stepped_are_lost_the_batch_is_trained_again() -> None:
    run = Run()
    holders, _ = run.stepped()
    run.generate()
    run.give(*(WorkerLeft(worker) for worker in holders))
    run.join(2)
    run.train()
    [again] = run.take(ExchangeSums)
    assert (again.attempt, again.policy) == (1, examples.policy(0))
    following = run.state.find_batch(1)
    assert following is not None
    assert all(group.policy is None for group in following.groups)


def test_one_that_comes_late_counts_as_soon_as_it_holds_the_version() -> None:
    run = Run(members=1)
    run.give(WorkerJoined("trainer-1-a", "trainer-1", "trainer", concurrency=1))
    run.generate()
    assert {piece.worker for piece in run.commands if isinstance(piece, TrainPiece)} == {
        "trainer-0-a"
    }
    run.join(1)
    run.train()
    [command] = run.take(ExchangeSums)
    assert {share.worker for share in command.shares} == {"trainer-0-a", "trainer-1-a"}


def test_a_member_that_reports_an_earlier_version_is_believed_after_a_while() -> None:
    """The report that it holds none may be lost; one that was sent before the step comes after."""
    run = Run(members=1)
    [worker], _ = run.stepped()

    def report() -> int:
        run.give(MemberReported(worker, holds(0)), seconds=1.0)
        assert run.state.fluid is not None
        return run.state.fluid.holds[worker].version

    assert [report() for _ in range(4)] == [1, 1, 1, 0]
