from typing import Any

from services.scheduler.core.fluid.fluid_state import ATTEMPTS_PER_EPOCH
from services.scheduler.core.fragments import worker_lost
from services.scheduler.core.inputs import RecoveryDone, WorkerJoined
from services.scheduler.core.machine import step
from services.scheduler.core.state import BatchState, FragmentState, GroupState, State
from shared.messages.contracts import Command, GenerateFragment, TrainGroup
from shared.messages.fluid import BeginAgain, TrainPiece
from tests import examples
from tests.scheduler.core.machine_driver import EARLY, Machine, joined
from tests.scheduler.core.test_fluid import Run


def test_a_group_that_two_schedulers_have_cut_is_begun_anew_after_a_restart() -> None:
    """One gave out samples 0 to 2 at once, the other one 0 and 1; both gave out the rest."""
    machine = Machine("a", num_groups=1, group_size=4)
    machine.state = State(recovering=True)
    machine.handle(examples.published(0))
    for first, size in ((0, 3), (3, 1), (2, 2)):
        task = examples.task(first_sample=first, num_samples=size)
        machine.handle(task.model_copy(update={"worker": "a-0"}))
    machine.handle(RecoveryDone())
    tasks = machine.tasks(joined("a"))
    assert [(task.fragment.first_sample, task.fragment.num_samples) for task in tasks] == [
        (0, 2),
        (2, 2),
    ]
    assert {task.fragment.attempt for task in tasks} == {1}


def test_a_restarted_scheduler_knows_who_has_what() -> None:
    machine = Machine("a", "b", num_groups=2, **EARLY)
    trained = machine.finish(machine.tasks(examples.published(0))[:2])
    stored = machine.told
    recovered = State(recovering=True)
    commands: list[Command] = []
    order = (GenerateFragment, TrainGroup, object)
    events = [examples.published(0), *sorted(
        (e for e in stored if not isinstance(e, WorkerJoined)),
        key=lambda e: next(i for i, kind in enumerate(order) if isinstance(e, kind)),
    ), RecoveryDone(), joined("a"), joined("b")]  # fmt: skip
    # Results before groups, as the shell reads them.
    events.sort(key=lambda e: isinstance(e, RecoveryDone | WorkerJoined))
    results = [e for e in events if not isinstance(e, TrainGroup | RecoveryDone | WorkerJoined)]
    rest = [e for e in events if isinstance(e, TrainGroup | RecoveryDone | WorkerJoined)]
    for event in [*results, *rest]:
        recovered, more = step(machine.plan, recovered, event, 100.0)  # type: ignore[arg-type]
        commands += more
    assert trained
    mine, theirs = machine.state.batches, recovered.batches
    assert [[g.sent for g in b.groups] for b in mine] == [
        [g.sent for g in b.groups] for b in theirs
    ]
    assert {c.kind for c in commands} <= {"generate_fragment"}
    issued = [e.fragment.slot for e in stored if isinstance(e, GenerateFragment)]
    again = [c.fragment.slot for c in commands if isinstance(c, GenerateFragment)]
    assert not set(issued) & set(again)


def test_a_device_is_lost_with_two_fragments_of_a_superseded_group() -> None:
    """The first one discards the group, and the second one must not come back to it."""
    pieces = tuple(
        FragmentState(first_sample=n, num_samples=2, attempt=0, stage="issued", worker="a-0")
        for n in (0, 2)
    )
    group = GroupState(policy=examples.policy(0), fragments=pieces, num_cut=4)
    batch = BatchState(index=1, groups=(group,))
    state = State(phase="running", policy=examples.policy(1), batches=(batch,))
    plan = examples.plan(num_groups=1, group_size=4)
    state = worker_lost(plan, state, "a-0")
    assert state.find_group(1, 0) == GroupState(first_attempt=1)


def test_a_scheduler_that_finds_nothing_of_a_batch_begins_with_an_attempt_of_its_own() -> None:
    """Members may have a sum, an update or a version of which nothing is stored any more."""
    run = restarted(epoch=3)
    assert run.take(BeginAgain) == [BeginAgain(batch=0, attempt=2 * ATTEMPTS_PER_EPOCH)]
    run.generate()
    assert {piece.attempt for piece in run.take(TrainPiece)} == {2 * ATTEMPTS_PER_EPOCH}


def test_a_group_whose_message_is_lost_is_sent_under_another_attempt_than_its_pieces() -> None:
    """They are stored, so that pieces of the same names could not be."""
    before = Run()
    tasks = before.take(GenerateFragment)
    results = [each for t in tasks for each in (examples.generated(t), examples.scored(t))]
    before.give(*results)
    given = before.take(TrainPiece)
    [sent, *_] = before.take(TrainGroup)
    after = restarted(*tasks, *results, *given)
    pieces = {(each.piece.group, each.piece.attempt) for each in after.take(TrainPiece)}
    assert given and (sent.group, sent.attempt + 1) in pieces
    assert {group.attempt for group in after.take(TrainGroup)} == {sent.attempt + 1}


def test_a_group_that_nobody_has_any_more_is_one_piece_in_deterministic_mode() -> None:
    before = Run(deterministic=True)
    tasks = before.take(GenerateFragment)
    results = [each for t in tasks for each in (examples.generated(t), examples.scored(t))]
    before.give(*results)
    sent, given = before.take(TrainGroup), before.take(TrainPiece)
    again = BeginAgain(batch=0, attempt=1)
    after = restarted(*tasks, *results, *sent, *given, again, deterministic=True)
    pieces = after.take(TrainPiece)
    assert {each.attempt for each in pieces} == {1}
    assert {each.piece.num_samples for each in pieces} == {after.plan.group_size}


def restarted(*stored: Any, epoch: int = 2, **changes: Any) -> Run:
    """A run whose scheduler has found these messages when it was started."""
    run = Run(0, **changes)
    run.state = State(recovering=True)
    run.give(run.published(0), *stored, RecoveryDone(epoch))
    run.join(0)
    run.join(1)
    return run


def test_a_late_score_for_the_next_batch_does_not_take_the_slot_of_a_new_one() -> None:
    """A broker has lost all messages, and the scheduler that knew of the task is dead."""
    machine = Machine("a", num_groups=1, group_size=1)
    machine.state = State(recovering=True)
    machine.handle(examples.published(0))
    late = examples.task(batch=1, group=0, first_sample=0, num_samples=1)
    machine.handle(examples.scored(late))
    machine.handle(RecoveryDone())
    machine.finish(machine.tasks(joined("a")))
    [task] = machine.tasks(examples.published(1))
    assert (task.fragment.batch, task.fragment.attempt) == (1, 1)
