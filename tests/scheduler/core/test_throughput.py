"""What a batch should take, by what was learned of the devices, and where work waits meanwhile."""

from dataclasses import replace
from itertools import product
from typing import Literal

import pytest

from services.scheduler.core.state import FragmentState, GroupState, Plan, Stage, State
from services.scheduler.core.tag.estimates import Costs
from services.scheduler.core.throughput import BatchForecast, forecast_batch
from services.scheduler.core.waiting import WaitingSamples, queues
from services.scheduler.core.workers import AssignedFragment, Workers
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import load_profile
from services.scheduler.costs.split import Split
from services.scheduler.sim.forecast import forecast
from shared.messages.contracts import FragmentSlot
from tests.scheduler.sim.situations import opening

PROFILE, SPLIT = load_profile("qwen-image"), Split({"H100": 8}, {"H100": 24})
SIZE = PROFILE.shape.group_size


@pytest.fixture
def opened() -> tuple[Plan, State]:
    return opening(PROFILE, SPLIT, SIZE)


def test_forecast_and_bound_are_those_of_the_planner(opened: tuple[Plan, State]) -> None:
    plan, state = opened
    found = forecast_batch(plan, state)
    assert found.forecast_seconds is not None and found.bound_seconds is not None
    planned = forecast(PROFILE, SPLIT, SIZE, plan.schedule).seconds
    assert found.forecast_seconds == pytest.approx(planned, rel=0.02)
    assert found.bound_seconds == pytest.approx(floor_seconds(PROFILE, {"H100": 32}), rel=0.05)
    assert found.bound_seconds < found.forecast_seconds


def test_nothing_is_said_before_both_tasks_were_measured(opened: tuple[Plan, State]) -> None:
    plan, state = opened
    for costs in (Costs(), replace(state.costs, gradient={})):
        assert forecast_batch(plan, replace(state, costs=costs)) == BatchForecast()
    gone = {each: w for each, w in state.workers.items() if w.service != "member"}
    assert (
        forecast_batch(plan, replace(state, workers=type(state.workers)(gone))) == BatchForecast()
    )


@pytest.mark.parametrize("mode", ["disaggregated", "sequential", "colocated", "fluid"])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_whatever_devices_there_are_no_forecast_beats_the_bound(
    mode: Literal["disaggregated", "sequential", "colocated", "fluid"], max_staleness: int
) -> None:
    plan, state = opening(PROFILE, SPLIT, SIZE, max_staleness=max_staleness)
    plan = replace(plan, schedule=plan.schedule.changed(mode=mode))
    lends = mode == "disaggregated"
    members = [each for each in state.workers.values() if each.service == "member"]
    for generating, at_once, number in product((True, False), (0, 1, 8), (1, len(members))):
        able = [
            replace(each, lent_concurrency=at_once) if lends
            else replace(each, concurrency=at_once, lent_concurrency=0, loan=None)
            for each in members[:number]
        ]  # fmt: skip
        workers = {each.address: each for each in (*state.only_generate * generating, *able)}
        found = forecast_batch(plan, replace(state, workers=Workers(workers)))
        if found.forecast_seconds is not None and found.bound_seconds is not None:
            assert found.bound_seconds <= found.forecast_seconds


def by_name(plan: Plan, state: State, now: float) -> dict[str, WaitingSamples]:
    found = queues(plan, state, now, forecast_batch(plan, state))
    assert [each.name for each in found] == ["generation", "in_hand", "scoring", "training"]
    return {each.name: each for each in found}


def test_at_the_opening_everything_waits_for_a_device(opened: tuple[Plan, State]) -> None:
    plan, state = opened
    found = by_name(plan, state, 7.0)
    waiting = found.pop("generation")
    assert (waiting.samples, waiting.oldest_seconds) == (plan.num_groups * plan.group_size, 7.0)
    assert not waiting.is_late
    assert all((each.samples, each.oldest_seconds) == (0, None) for each in found.values())
    usual = waiting.usual_seconds
    assert usual is not None and by_name(plan, state, 4 * usual)["generation"].is_late


def test_the_oldest_at_devices_is_the_one_that_is_furthest_beyond_what_it_takes(
    opened: tuple[Plan, State],
) -> None:
    plan, state = opened
    first, second = state.rollout[:2]
    slot = FragmentSlot(batch=3, group=0, first_sample=0, attempt=0)
    alone = _having(state, {first.address: (slot, 100.0)})
    usual = by_name(plan, alone, 101.0)["in_hand"].usual_seconds
    assert usual is not None
    held = {first.address: (slot, 100.0), second.address: (slot, 100.0 - 4 * usual - 10)}
    queue = by_name(plan, _having(state, held), 100.0)["in_hand"]
    assert (queue.worker, queue.is_late, queue.samples) == (second.name, True, 2 * SIZE)


def _having(state: State, held: dict[str, tuple[FragmentSlot, float]]) -> State:
    changed = [
        replace(state.workers[each], assigned=(AssignedFragment(slot, SIZE, since),))
        for each, (slot, since) in held.items()
    ]
    return replace(state, workers=state.workers.changed(changed))


def test_samples_wait_for_rewards_and_whole_groups_for_members(opened: tuple[Plan, State]) -> None:
    plan, state = opened
    batch = state.batch
    assert batch is not None

    def group(stage: Stage, at: float) -> GroupState:
        each = FragmentState(
            first_sample=0, num_samples=SIZE, attempt=0, stage=stage, generated_at=at
        )  # fmt: skip
        return GroupState().with_fragment(each)

    batch = batch.with_groups({
        0: group("generated", 5.0),
        1: group("generated", 2.0),
        2: replace(group("scored", 3.0), sent=True),
        3: replace(group("scored", 1.0), sent=True),
    })  # fmt: skip
    first_heard_of_with_its_rewards = replace(group("scored", 0.0), sent=True)
    batch = batch.with_groups({4: first_heard_of_with_its_rewards})
    assert state.fluid is not None
    trained = replace(state.with_batch(batch), fluid=replace(state.fluid, trained=frozenset({3})))
    found = by_name(plan, trained, 10.0)
    assert (found["scoring"].samples, found["scoring"].oldest_seconds) == (2 * SIZE, 8.0)
    assert (found["training"].samples, found["training"].oldest_seconds) == (2 * SIZE, 7.0)
