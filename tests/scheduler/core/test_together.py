"""Reports that come together are recorded one by one, and what follows is issued once."""

import pytest

from services.scheduler.core.inputs import MachineInput
from services.scheduler.core.machine import step_together
from services.scheduler.core.workers import Workers
from shared.messages.contracts import GenerateFragment, TrainGroup
from tests import examples
from tests.scheduler.core.machine_driver import Machine, joined


def test_results_that_come_together_give_everybody_what_follows_for_them() -> None:
    machine = Machine("a", "b", "c", num_groups=64, group_size=2)
    tasks = machine.tasks(examples.published(0))
    first = [next(t for t in tasks if t.worker == f"{name}-0") for name in "abc"]
    events: list[MachineInput] = [examples.generated(task) for task in first]
    events += [examples.scored(task) for task in first]
    state, commands = step_together(machine.plan, machine.state, events, machine.now + 1)
    assert {c.worker for c in commands if isinstance(c, GenerateFragment)} == {"a-0", "b-0", "c-0"}
    whole = {t.fragment.slot.group for t in first if t.fragment.num_samples == 2}
    assert {c.group for c in commands if isinstance(c, TrainGroup)} == whole
    again, nothing = step_together(machine.plan, state, events, machine.now + 2)
    assert nothing == [] and again.batches == state.batches


def test_workers_that_come_together_are_all_given_something() -> None:
    machine = Machine("a", num_groups=8, group_size=2)
    machine.handle(examples.published(0))
    events = [joined(name) for name in "bcd"]
    _, commands = step_together(machine.plan, machine.state, events, machine.now + 1)
    assert {c.worker for c in commands if isinstance(c, GenerateFragment)} == {"b-0", "c-0", "d-0"}


def test_a_fragment_that_is_scored_first_is_taken_off_its_device_without_a_look_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine("a", "b", num_groups=4, group_size=2)
    task = machine.tasks(examples.published(0))[0]
    machine.handle(examples.scored(task))
    looks = list[Workers]()

    def values(workers: Workers) -> list[object]:
        looks.append(workers)
        return [workers[address] for address in workers]

    monkeypatch.setattr(Workers, "values", values)
    machine.handle(examples.generated(task))
    assert not looks
    held = machine.state.workers[task.worker].assigned
    assert task.fragment.slot not in [each.slot for each in held]
