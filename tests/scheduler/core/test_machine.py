from dataclasses import replace

from services.scheduler.core.inputs import DeviceReported, MachineInput
from services.scheduler.core.tag.estimates import Costs
from services.scheduler.core.workers import Loan
from shared.limits import MAX_FRAGMENTS_PER_GROUP
from shared.messages.contracts import (
    Command,
    FragmentFailed,
    FragmentReleased,
    OperatorRequest,
    RunFailed,
    TrainGroup,
)
from tests import examples
from tests.scheduler.core.machine_driver import EARLY, Machine, joined


def test_a_committed_version_opens_its_batch_strictly_on_policy() -> None:
    tasks = Machine().tasks(examples.published(0))
    assert tasks
    assert all(task.fragment.batch == task.policy.version == 0 for task in tasks)


def test_fragments_are_issued_group_by_group() -> None:
    machine = Machine("a", "b", num_groups=3)
    slots = [
        (t.fragment.group, t.fragment.first_sample) for t in machine.tasks(examples.published(0))
    ]
    assert slots == [(0, 0), (0, 2), (1, 0), (1, 2)]


def test_a_device_has_one_fragment_in_work_and_one_queued() -> None:
    machine = Machine("a", num_groups=10)
    first = machine.tasks(examples.published(0))
    assert len(first) == machine.plan.queue_depth == 2
    assert len(machine.tasks(examples.generated(first[0]))) == 1
    assert len(machine.tasks(joined("b"))) == 2


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


def test_fragments_of_automatic_size_fill_every_group() -> None:
    machine = Machine("a", "b", "c", num_groups=5, group_size=12, fragment_size="auto")
    trained = machine.finish(machine.tasks(examples.published(0)))
    sizes = [[f.fragment.num_samples for f in train.fragments] for train in trained]
    assert [sum(cut) for cut in sizes] == [12] * 5
    assert min(min(cut) for cut in sizes) < max(max(cut) for cut in sizes)  # smaller at the end


def test_one_message_can_name_all_fragments_of_a_group_however_many_devices_there_are() -> None:
    names = [f"w{number}" for number in range(70)]
    machine = Machine(*names, num_groups=1, group_size=130, fragment_size="auto")
    [train] = machine.finish(machine.tasks(examples.published(0)))
    assert len(train.fragments) <= MAX_FRAGMENTS_PER_GROUP


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
        before = machine.state.batches
        assert machine.handle(event) == []
        assert machine.state.batches == before


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


def test_a_run_is_paused_before_its_first_version() -> None:
    machine = Machine(num_groups=10)
    machine.handle(OperatorRequest(action="pause", id="x"))
    assert machine.tasks(examples.published(0)) == []
    assert machine.tasks(OperatorRequest(action="resume", id="y")) != []
    assert machine.state.phase == "running"


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
    def history() -> list[MachineInput | Command]:
        machine = Machine("a", "b", num_groups=3)
        machine.finish(machine.tasks(examples.published(0)))
        machine.handle(examples.published(1))
        return machine.told

    assert history() == history()


def test_with_one_step_asynchrony_idle_workers_begin_the_next_batch_with_the_same_version() -> None:
    machine = Machine("a", "b", num_groups=2, **EARLY)
    tasks = machine.tasks(examples.published(0))
    early = machine.tasks(examples.generated(tasks[0])) + machine.tasks(
        examples.generated(tasks[1])
    )
    assert [(t.fragment.batch, t.policy.version) for t in early] == [(1, 0), (1, 0)]


def test_an_early_group_that_is_under_way_keeps_its_version() -> None:
    machine = Machine("a", num_groups=2, **EARLY)
    tasks = machine.tasks(examples.published(0))
    machine.finish(tasks)
    sent = [each for each in machine.handle(examples.published(1)) if isinstance(each, TrainGroup)]
    assert [(train.batch, train.policy.version) for train in sent] == [(1, 0)] * 2
    assert machine.state.batch is not None
    kept = [group.policy for group in machine.state.batch.groups if group.policy]
    assert kept == [examples.policy(0)] * 2


def test_nothing_begins_with_a_superseded_version() -> None:
    """A group of which a part is still to be begun is begun again as a whole."""
    machine = Machine("a", num_groups=2, **EARLY)
    tasks = machine.tasks(examples.published(0))
    while tasks[0].fragment.batch == 0:
        task = tasks.pop(0)
        tasks += machine.tasks(examples.generated(task))
        machine.handle(examples.scored(task))
    begun, waits = tasks
    assert (begun.fragment.batch, waits.fragment.batch) == (1, 1)
    machine.handle(examples.published(1))
    released = FragmentReleased(slot=waits.fragment.slot, worker="a-0", reason="stale")
    again = machine.tasks(released) + machine.tasks(examples.generated(begun))
    assert [task.policy.version for task in again] == [1, 1]
    assert [task.fragment.first_sample for task in again] == [0, 2]
    assert {task.fragment.attempt for task in again} == {1}


def lend(machine: Machine, address: str, samples: int) -> None:
    """Lend a member, with so many samples left for it."""
    member = machine.state.workers[address]
    loan = Loan(number=1, mode="generate", lent_until=100.0)
    tag = replace(machine.state.tag, samples_left=samples)
    machine.state = replace(machine.state.with_worker(member.with_loan(loan, 0.0)), tag=tag)


def test_nothing_is_left_for_a_lent_member_that_may_not_take_it() -> None:
    """It is by far the fastest, but this fragment is larger than its share."""
    machine = Machine("a", num_groups=1, group_size=2)
    machine.handle(joined("trainer", "trainer"))
    [task] = machine.tasks(examples.published(0))
    costs = Costs().observe_rollout("a-0", 10.0).observe_rollout("trainer-0", 0.01)
    machine.state = replace(machine.state, costs=costs)
    lend(machine, "trainer-0", 1)
    failed = FragmentFailed(
        slot=task.fragment.slot, stage="rollout", reason="oom", worker=task.worker
    )
    assert [again.worker for again in machine.tasks(failed)] == ["a-0"]


def test_a_member_that_reports_nothing_new_changes_nothing() -> None:
    machine = Machine("a", num_groups=1)
    machine.handle(joined("trainer", "trainer"))
    machine.handle(DeviceReported("trainer-0", 3, "train"))
    loan = machine.state.workers["trainer-0"].loan
    assert loan is not None and loan.number == 3
    before = machine.state
    assert machine.handle(DeviceReported("trainer-0", 3, "train")) == []
    assert machine.state is before


def test_a_batch_that_cannot_be_trained_fails_the_run_with_the_reason_until_it_is_resumed() -> None:
    machine = Machine()
    machine.handle(examples.published(0))
    machine.handle(RunFailed(batch=1, worker="trainer-0", reason="of a batch that is not open"))
    assert machine.state.phase == "running"
    machine.handle(RunFailed(batch=0, worker="trainer-0", reason="70 GiB of 79"))
    assert (machine.state.phase, machine.state.failure) == ("failed", "batch 0: 70 GiB of 79")
    machine.handle(OperatorRequest(action="resume", id="one"))
    assert (machine.state.phase, machine.state.failure) == ("running", None)
