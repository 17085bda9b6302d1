"""A worker that an operator drains is given nothing new, finishes what it has, and comes home."""

from typing import Literal

from services.scheduler.core.inputs import Tick, WorkerJoined, WorkerLeft
from shared.messages.contracts import Command, SetDevice, TagRequest, WorkerRequest
from tests import examples
from tests.scheduler.core.machine_driver import Machine, joined


def ask(action: Literal["drain", "undrain"], worker: str) -> WorkerRequest:
    return WorkerRequest(action=action, worker=worker, id="x")


def test_a_drained_device_finishes_what_it_has_and_is_given_nothing_else() -> None:
    machine = Machine("a", "b", num_groups=4)
    tasks = machine.tasks(examples.published(0))
    own = [task for task in tasks if task.worker == "a-0"]
    assert len(own) == 2 and machine.tasks(ask("drain", "a")) == []
    for task in own:
        given = machine.tasks(examples.generated(task))
        assert all(each.worker == "b-0" for each in given)
        machine.handle(examples.scored(task))
    assert machine.state.workers["a-0"].assigned == ()
    done = [machine.state.find_fragment(task.fragment.slot) for task in own]
    assert [each and each.stage for each in done] == ["scored", "scored"]
    back = machine.tasks(ask("undrain", "a"))
    assert {task.worker for task in back} == {"a-0"}


def test_draining_holds_for_the_name_however_often_the_worker_is_started() -> None:
    machine = Machine("a", "b", num_groups=4)
    machine.handle(ask("drain", "a"))
    machine.handle(WorkerLeft("a-0"))
    assert {task.worker for task in machine.tasks(examples.published(0))} == {"b-0"}
    assert machine.tasks(joined("a", life=1)) == []
    assert machine.handle(ask("drain", "a")) == [], "twice is the same as once"
    assert machine.tasks(ask("undrain", "a")) != []


def test_a_drained_device_that_hangs_loses_what_it_has_to_others() -> None:
    machine = Machine("a", "b", num_groups=2, slot_deadline_s=10.0)
    tasks = machine.tasks(examples.published(0))
    machine.handle(ask("drain", "a"))
    for task in [task for task in tasks if task.worker == "b-0"]:
        machine.handle(examples.generated(task))
    again = [task for _ in range(13) for task in machine.tasks(Tick())]
    stuck = {task.fragment for task in tasks if task.worker == "a-0"}
    assert {task.fragment for task in again if task.worker == "b-0"} >= stuck
    assert machine.state.workers["a-0"].drained


def test_a_lent_device_that_is_drained_comes_home_and_is_not_lent_again() -> None:
    machine = Machine("a", num_groups=4)
    machine.handle(WorkerJoined("trainer-0", "trainer", "trainer", concurrency=1))
    machine.handle(TagRequest(mode="fixed", groups=2, id="x"))
    [lent] = loans(machine.handle(examples.published(0)))
    assert lent.mode == "generate"
    [home] = loans(machine.handle(ask("drain", "trainer")))
    assert (home.mode, home.keep) == ("train", True)
    for _ in range(5):
        assert not [each for each in loans(machine.handle(Tick())) if each.mode == "generate"]
    [again] = loans(machine.handle(ask("undrain", "trainer")))
    assert again.mode == "generate"


def loans(commands: list[Command]) -> list[SetDevice]:
    return [command for command in commands if isinstance(command, SetDevice)]
