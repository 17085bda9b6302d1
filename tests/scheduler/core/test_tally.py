"""What is counted along with every change is what counting anew would give."""

from random import Random

import pytest

from services.scheduler.core import fragments
from services.scheduler.core.assign import assign
from services.scheduler.core.inputs import MachineInput, WorkerJoined, WorkerLeft
from services.scheduler.core.machine import step
from services.scheduler.core.state import EMPTY_GROUP, State
from services.scheduler.core.tally import Tally, count_groups
from services.scheduler.core.unissued import unissued_samples
from services.scheduler.core.workers import Workers
from shared.messages.contracts import (
    Command,
    FragmentFailed,
    GenerateFragment,
    GroupFailed,
    TrainGroup,
)
from tests import examples


def assert_right(state: State, size: int) -> None:
    """Compare all that is kept along with what is true of the groups and workers."""
    for batch in state.batches:
        kept, anew = batch.tally, count_groups(batch.groups, EMPTY_GROUP)
        assert {name: n for name, n in kept.stages.items() if n} == dict(anew.stages)
        for field in ("cut", "pending", "scored", "maybe_whole", "sent"):
            assert getattr(kept, field) == getattr(anew, field), field
        before = batch.groups[: kept.first]
        assert all(group.num_cut == size and not group.num_pending for group in before)
        assert not any(group.num_cut for group in batch.groups[kept.end :])
    workers, anew_workers = state.workers, Workers(state.workers)
    assert workers.roles == anew_workers.roles
    assert workers.with_room(2) == anew_workers.with_room(2)


@pytest.mark.parametrize("seed", range(12))
def test_over_a_batch_with_failures_and_losses(seed: int) -> None:
    random = Random(seed)
    plan = examples.plan(
        num_groups=12, group_size=8, fragment_size=random.choice((2, 4)), max_attempts=99,
        max_losses=99, max_staleness=random.choice((0, 1)),
    )  # fmt: skip
    state, work = State(), list[Command]()
    joined = [WorkerJoined("trainer-0", "trainer", "trainer")]
    joined += [WorkerJoined(f"r{n}-0", f"r{n}", "rollout") for n in range(5)]
    begin: list[MachineInput] = [*joined, examples.published(0)]
    for now, event in enumerate(begin):
        state, commands = step(plan, state, event, float(now))
        work += commands
    for now in range(10, 160):
        if not work:
            break
        command = work.pop(random.randrange(len(work)))
        for each in _results(random, command):
            state, commands = step(plan, state, each, float(now))
            work += commands
            assert_right(state, plan.group_size)
        if random.random() < 0.05:
            name = f"r{random.randrange(5)}"
            again: list[MachineInput] = [WorkerLeft(f"{name}-0")]
            for each in [*again, WorkerJoined(f"{name}-0", name, "rollout")]:
                state, commands = step(plan, state, each, float(now))
                work += commands
                assert_right(state, plan.group_size)


def _results(random: Random, command: Command) -> list[MachineInput]:
    if isinstance(command, GenerateFragment):
        if random.random() < 0.1:
            return [
                FragmentFailed(
                    slot=command.fragment.slot,
                    stage="rollout",
                    reason="reason",
                    worker=command.worker,
                )
            ]
        results: list[MachineInput] = [examples.generated(command), examples.scored(command)]
        return results if random.random() < 0.9 else results[::-1]
    if isinstance(command, TrainGroup):
        batch, group, attempt = command.batch, command.group, command.attempt
        if random.random() < 0.1:
            return [GroupFailed(batch=batch, group=group, attempt=attempt, reason="reason")]
    return []


def test_what_is_left_to_issue_is_not_counted_group_by_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = examples.plan(num_groups=300, group_size=4, fragment_size=2)
    state = State()
    for number in range(3):
        state, _ = step(plan, state, WorkerJoined(f"r{number}-0", f"r{number}", "rollout"), 0.0)
    state = fragments.batch_opened(plan, state, examples.policy(0), 0.0)
    assert state.batch is not None
    changed = list[int]()
    original = Tally.changed

    def counted(self: Tally, index: int, *groups: object) -> Tally:
        changed.append(index)
        return original(self, index, *groups)  # type: ignore[arg-type]

    monkeypatch.setattr(Tally, "changed", counted)
    state, tasks = assign(plan, state, 0.0)
    assert len(tasks) == 6
    assert changed == [0, 1, 2]
    assert state.batch is not None
    assert unissued_samples(plan, state.batch, 300) == 300 * 4 - 6 * 2
