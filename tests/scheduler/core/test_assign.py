"""Fast assignment decides as the plain one does, and its work does not grow with the square."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from services.scheduler.core import device_queues, fragments
from services.scheduler.core.assign import assign
from services.scheduler.core.device_fragments import unassign
from services.scheduler.core.inputs import WorkerJoined
from services.scheduler.core.lending import lendable
from services.scheduler.core.machine import step
from services.scheduler.core.state import Plan, State, WorkerState
from services.scheduler.core.workers import Loan
from shared.learning.windows import Windows
from shared.messages.contracts import GenerateFragment
from tests import examples
from tests.scheduler.core import plain_assignment


def some_plan(random: Random) -> Plan:
    size = random.choice((2, 4, 6, 12, 16))
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    staleness = random.choice((0, 0, 1))
    num_groups = random.randint(1, 40)
    return examples.plan(
        num_groups=num_groups, group_size=size, num_batches=3, max_staleness=staleness,
        fragment_size=random.choice(("auto", "auto", random.choice(divisors))),
        queue_depth=random.choice((1, 2, 2, 3)),
    )  # fmt: skip


def some_state(random: Random, plan: Plan) -> State:
    """Devices of some speeds, with or without lent members; speeds are equal, or differ, or are
    not known yet."""
    state = State()
    speeds = random.choice(((1.0,), (0.3,), (1.0, 2.0, 5.0), (0.1, 0.7, 1.3, 20.0)))
    for number in range(2):
        joined = WorkerJoined(f"t{number}-0", f"t{number}", "trainer", concurrency=1 + number)
        state, _ = step(plan, state, joined, 0.0)
    for number in range(random.randint(1, 30)):
        slots = random.choice((1, 1, 1, 2, 3))
        joined = WorkerJoined(f"r{number}-0", f"r{number}", "rollout", concurrency=slots)
        state, _ = step(plan, state, joined, 0.0)
        if random.random() < 0.7:
            costs = state.costs.observe_rollout(joined.address, random.choice(speeds))
            state = replace(state, costs=costs)
    if random.random() < 0.4:
        samples = random.randint(0, plan.num_groups) * plan.group_size
        state = replace(state, tag=replace(state.tag, samples_left=samples))
        for member in random.sample(lendable(state), random.randint(1, 2)):
            state = state.with_worker(member.with_loan(Loan(number=1, mode="generate"), 0.0))
    return state


@pytest.mark.parametrize("seed", range(60))
def test_it_decides_as_plain_assignment_does(seed: int) -> None:
    """Over a whole batch, whatever is finished, lost and given back in between."""
    random = Random(seed)
    plan = some_plan(random)
    state = some_state(random, plan)
    policy = examples.policy(0)
    state, now = fragments.batch_opened(plan, state, policy, 0.0), 0.0
    for _ in range(60):
        fast, tasks = assign(plan, state, now)
        plain, same = plain_assignment.assign(plan, state, now)
        assert tasks == same
        assert fast == plain
        state = fast
        now += random.choice((0.0, 0.5, 1.0, random.random()))
        state = _something_ends(random, plan, state, now)


def _something_ends(random: Random, plan: Plan, state: State, now: float) -> State:
    busy = [worker for worker in state.workers.values() if worker.assigned]
    for worker in random.sample(busy, min(len(busy), random.randint(1, 4))):
        slot = worker.assigned[0].slot
        kind = random.random()
        if kind < 0.1:
            state = fragments.retry(plan, state, slot, "reason", now)
        elif kind < 0.2:
            state = unassign(state, slot, worker.address, now)
            state = fragments.give_back(state, slot, worker.address)
        else:
            found = state.find_fragment(slot)
            state = unassign(state, slot, worker.address, now)
            if found is not None:
                state = state.with_fragment(slot, replace(found, stage="generated"))
    return state


def opening(monkeypatch: pytest.MonkeyPatch, num_devices: int) -> tuple[int, int, int]:
    """Tasks issued at the opening of a batch, how often a device's queues were computed, and how
    often a group's window was drawn."""
    count = drawn = 0
    original = device_queues.forecast_queue

    def counted(
        state: State, worker: WorkerState, now: float, *known: Any
    ) -> device_queues.DeviceQueue:
        nonlocal count
        count += 1
        return original(state, worker, now, *known)

    def counted_start(windows: Windows, seed: int, batch: int, group: int) -> int:
        nonlocal drawn
        drawn += 1
        return start(windows, seed, batch, group)

    start = Windows.start
    plan = examples.plan(num_groups=num_devices, group_size=4, fragment_size=2)
    state = State()
    for number in range(num_devices):
        joined = WorkerJoined(f"r{number}-0", f"r{number}", "rollout")
        state, _ = step(plan, state, joined, 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(device_queues, "forecast_queue", counted)
        patched.setattr(Windows, "start", counted_start)
        _, commands = step(plan, state, examples.published(0), 1.0)
    return sum(isinstance(command, GenerateFragment) for command in commands), count, drawn


def test_the_queues_of_a_device_are_computed_once_and_after_it_was_given_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks, count, _ = opening(monkeypatch, 300)
    assert tasks == 600
    assert count <= 300 + tasks


def test_the_window_of_a_group_is_drawn_once_for_all_of_its_fragments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks, _, drawn = opening(monkeypatch, 30)
    assert (tasks, drawn) == (60, 30)
