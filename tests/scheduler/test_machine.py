from services.scheduler.machine import Input, WorkerJoined, WorkerLeft, step
from services.scheduler.state import State
from shared.contracts import (
    Command,
    FragmentFailed,
    GenerateFragment,
    GroupFailed,
    OperatorRequest,
    TrainGroup,
)
from tests import examples


class Machine:
    """Feeds events to the machine one after another."""

    def __init__(self, **plan: int) -> None:
        self.plan = examples.plan(**plan)
        self.state = State()

    def handle(self, event: Input) -> list[Command]:
        self.state, commands = step(self.plan, self.state, event)
        return commands

    def tasks(self, event: Input) -> list[GenerateFragment]:
        return [c for c in self.handle(event) if isinstance(c, GenerateFragment)]

    def finish(self, tasks: list[GenerateFragment]) -> list[TrainGroup]:
        """Generate and score these tasks and whatever they make room for."""
        trained: list[TrainGroup] = []
        while tasks:
            task = tasks.pop(0)
            for command in [
                *self.handle(examples.generated(task)),
                *self.handle(examples.scored(task)),
            ]:
                if isinstance(command, TrainGroup):
                    trained.append(command)
                else:
                    tasks.append(command)
        return trained


def test_a_committed_version_opens_its_batch_strictly_on_policy() -> None:
    tasks = Machine().tasks(examples.published(0))
    assert tasks
    assert all(task.fragment.batch == task.policy.version == 0 for task in tasks)


def test_fragments_are_issued_group_by_group() -> None:
    machine = Machine(num_groups=3)
    machine.handle(WorkerJoined("a", "rollout"))
    machine.handle(WorkerJoined("b", "rollout"))
    slots = [
        (t.fragment.group, t.fragment.first_sample) for t in machine.tasks(examples.published(0))
    ]
    assert slots == [(0, 0), (0, 2), (1, 0), (1, 2), (2, 0), (2, 2)]


def test_no_more_fragments_are_out_than_the_workers_can_take_soon() -> None:
    machine = Machine(num_groups=10)
    first = machine.tasks(examples.published(0))
    assert len(first) == machine.plan.fragments_per_worker
    assert machine.tasks(examples.generated(first[0])) != []
    assert len(machine.tasks(WorkerJoined("a", "rollout"))) == 0
    assert len(machine.tasks(WorkerJoined("b", "rollout"))) == machine.plan.fragments_per_worker
    assert machine.tasks(WorkerLeft("b")) == []


def test_a_group_trains_when_its_last_sample_is_scored() -> None:
    machine = Machine(num_groups=1)
    first, second = machine.tasks(examples.published(0))
    assert machine.handle(examples.scored(second, (3.0, 3.0))) == []
    [train] = machine.handle(examples.scored(first, (1.0, 1.0)))
    assert isinstance(train, TrainGroup)
    assert [f.fragment.first_sample for f in train.fragments] == [0, 2]
    assert train.advantages[0] < 0 < train.advantages[3]


def test_every_sample_of_a_batch_is_trained_once() -> None:
    machine = Machine(num_groups=5)
    trained = machine.finish(machine.tasks(examples.published(0)))
    assert sorted(train.group for train in trained) == [0, 1, 2, 3, 4]
    assert machine.tasks(examples.published(1))[0].fragment.batch == 1


def test_the_last_commit_finishes_the_run() -> None:
    machine = Machine(num_batches=1)
    machine.finish(machine.tasks(examples.published(0)))
    assert machine.handle(examples.published(1)) == []
    assert machine.state.phase == "finished"


def test_an_event_seen_twice_changes_nothing() -> None:
    machine = Machine()
    [task, *_] = machine.tasks(examples.published(0))
    for event in (examples.published(0), examples.generated(task), examples.scored(task)):
        machine.handle(event)
        before = machine.state
        assert machine.handle(event) == []
        assert machine.state == before


def test_a_failed_fragment_gets_another_attempt_and_the_old_one_counts_no_more() -> None:
    machine = Machine(num_groups=1)
    first, second = machine.tasks(examples.published(0))
    [again] = machine.tasks(FragmentFailed(slot=first.fragment.slot, stage="rollout", reason="oom"))
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
        failed = FragmentFailed(slot=task.fragment.slot, stage="reward", reason="no digit")
        tasks = machine.tasks(failed)
        task = tasks[0] if tasks else task
    assert machine.state.phase == "failed"
    assert machine.state.failure is not None and "no digit" in machine.state.failure
    assert machine.tasks(OperatorRequest(action="resume", id="x")) != []


def test_a_refused_fragment_sends_its_group_again() -> None:
    machine = Machine(num_groups=1)
    tasks = machine.tasks(examples.published(0))
    [train] = machine.finish(list(tasks))
    refused = FragmentFailed(slot=tasks[0].fragment.slot, stage="admission", reason="weights")
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


def test_a_result_by_other_weights_is_made_again() -> None:
    machine = Machine(num_groups=1)
    [task, _] = machine.tasks(examples.published(0))
    foreign = examples.scored(task).model_copy(update={"policy": examples.policy(1)})
    [again] = machine.tasks(foreign)
    assert again.fragment.attempt == 1


def test_a_paused_run_issues_nothing_until_resumed() -> None:
    machine = Machine(num_groups=10)
    [task, *_] = machine.tasks(examples.published(0))
    machine.handle(OperatorRequest(action="pause", id="x"))
    assert machine.tasks(examples.generated(task)) == []
    assert machine.tasks(OperatorRequest(action="resume", id="y")) != []


def test_a_stopped_run_can_be_resumed_and_a_finished_one_cannot_be_stopped() -> None:
    machine = Machine(num_batches=1, num_groups=1)
    tasks = machine.tasks(examples.published(0))
    machine.handle(OperatorRequest(action="stop", id="x"))
    assert machine.tasks(examples.generated(tasks[0])) == []
    machine.handle(OperatorRequest(action="resume", id="y"))
    machine.finish(tasks)
    machine.handle(examples.published(1))
    machine.handle(OperatorRequest(action="stop", id="z"))
    assert machine.state.phase == "finished"


def test_the_same_events_give_the_same_commands() -> None:
    def history() -> list[Command]:
        machine = Machine(num_groups=3)
        tasks = machine.tasks(examples.published(0))
        return [*tasks, *machine.finish(list(tasks)), *machine.tasks(examples.published(1))]

    assert history() == history()
