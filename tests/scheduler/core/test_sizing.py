"""The size of fragments is chosen once per batch, by the formula that the planner has."""

from dataclasses import replace

import pytest

from services.scheduler.core.sizing import best_size, size_fragments
from services.scheduler.core.state import Plan, Sizing, State, new_batch
from services.scheduler.core.tag.estimates import Overhead
from services.scheduler.core.unissued import fragment_size, full_size, next_fragment_size, next_size
from services.scheduler.core.workers import Workers
from services.scheduler.costs.profile import load_profile
from services.scheduler.costs.seconds import fragment_seconds
from services.scheduler.costs.split import Split
from services.scheduler.sim.forecast import forecast, fragment_sizes
from services.scheduler.sim.profiled import simulate
from shared.recipe.schedule import RunSchedule
from tests.scheduler.sim.situations import opening

QWEN, FLUX = load_profile("qwen-image"), load_profile("flux1-dev")


def next_of(plan: Plan, state: State, left: int, queues: int) -> int:
    return next_fragment_size(plan, state, fragment_size(plan, state, queues), left, queues)


def situation(
    generate: int, train: int, *, name: str = "qwen-image", max_staleness: int = 0
) -> tuple[Plan, State]:
    profile = load_profile(name)
    split = Split({"H100": generate}, {"H100": train})
    size = profile.shape.group_size
    plan, state = opening(profile, split, size, max_staleness=max_staleness)
    plan = replace(plan, schedule=plan.schedule.changed(fragment_size="auto", tag="auto"))
    one, all_ = (fragment_seconds(profile, "H100", n) for n in (1, size))
    overhead = Overhead.known_after(one * (size - 1) / (all_ - one) - 1)
    return plan, replace(state, costs=state.costs.with_overhead(overhead))


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize(("generate", "train"), [(1, 31), (8, 24), (22, 10), (4, 4)])
@pytest.mark.parametrize("name", ["qwen-image", "hunyuanvideo"])
def test_what_is_chosen_is_what_the_planner_forecasts_to_be_best(
    name: str, generate: int, train: int, max_staleness: int
) -> None:
    plan, state = situation(generate, train, name=name, max_staleness=max_staleness)
    found = best_size(plan, state)
    assert found is not None
    profile, split = load_profile(name), Split({"H100": generate}, {"H100": train})
    seconds = {
        size: forecast(profile, split, size, plan.schedule).seconds
        for size in fragment_sizes(profile, plan.schedule)
    }
    assert seconds[found] <= 1.01 * min(seconds.values())


def test_while_costs_are_unknown_devices_decide_alone() -> None:
    plan, state = situation(8, 24)
    unknown = replace(state, costs=state.costs.with_overhead(Overhead()))
    assert size_fragments(plan, unknown) is unknown
    left = plan.num_groups * plan.group_size
    assert next_of(plan, unknown, left, 32) == next_size(plan, full_size(plan, 32), left, 32)


def test_without_a_device_that_generates_nothing_is_chosen() -> None:
    plan, state = situation(8, 24)
    none_left = replace(state, workers=Workers())
    assert size_fragments(plan, none_left) is none_left


def test_one_size_is_for_all_of_a_batch() -> None:
    plan, state = situation(8, 24)
    sized = size_fragments(plan, state)
    assert sized.sizing is not None and sized.sizing.batch == 3
    for left in (512, 100, 3):
        assert next_of(plan, sized, left, 32) == sized.sizing.samples
    slower = replace(sized, costs=sized.costs.with_overhead(Overhead.known_after(40.0)))
    assert size_fragments(plan, slower) is slower
    following = replace(slower, batches=(new_batch(plan, 4, 0.0),))
    assert size_fragments(plan, following).sizing == Sizing(4, 16)


def test_a_fixed_size_is_never_chosen_anew() -> None:
    plan, state = situation(8, 24)
    fixed = replace(plan, schedule=plan.schedule.changed(fragment_size=4))
    assert size_fragments(fixed, state) is state
    assert next_of(fixed, replace(state, sizing=Sizing(3, 16)), 3, 32) == 4


def test_sizes_vary_until_they_have_told_what_they_cost() -> None:
    plan, state = situation(8, 24, max_staleness=1)
    unknown = replace(state, costs=state.costs.with_overhead(Overhead()))
    sizes = {next_of(plan, unknown, left, 32) for left in range(1, 513)}
    assert len(sizes) == 2


def test_a_part_of_very_many_devices_stands_for_all() -> None:
    plan, state = situation(8, 24)
    many = 16
    workers = {
        f"{address}-{number}": replace(worker, address=f"{address}-{number}")
        for address, worker in state.workers.items()
        for number in range(many)
    }
    costs = state.costs
    of_all = {
        name: {a: known for a in workers if (known := costs_of.get(a.rpartition("-")[0]))}
        for name, costs_of in (("rollout", costs.rollout), ("gradient", costs.gradient))
    }
    state_of_many = replace(
        state,
        workers=Workers(workers),
        costs=replace(costs, rollout=of_all["rollout"], gradient=of_all["gradient"]),
    )
    plan_of_many = replace(plan, num_groups=many * plan.num_groups)
    assert best_size(plan_of_many, state_of_many) == best_size(plan, state)


@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_run_learns_what_it_is_told_elsewhere(max_staleness: int) -> None:
    schedule = RunSchedule(tag=24, max_staleness=1 if max_staleness else 0)
    told, learned = (
        simulate(
            QWEN, rollout={"H100": 8}, trainer={"H100": 24}, schedule=schedule, batches=4,
            warm_up=4, knows_costs=knows,
        ).step_seconds
        for knows in (True, False)
    )  # fmt: skip
    assert learned == pytest.approx(told, rel=0.03)


@pytest.mark.parametrize(
    "members",
    [
        {"H100": 16},
        pytest.param({"H100": 32}, marks=pytest.mark.slow),
        pytest.param({"H100": 16, "A100": 16}, marks=pytest.mark.slow),
    ],
    ids=["16 equal", "32 equal", "unequal"],
)
def test_fluid_devices_generate_in_fragments_of_the_best_size(members: dict[str, int]) -> None:
    fluid = RunSchedule(mode="fluid")
    shape = QWEN.shape.model_copy(update={"updates": 1})
    profile = QWEN.model_copy(update={"shape": shape})
    chosen, *fixed = (
        simulate(
            profile, rollout={}, trainer=members, schedule=fluid.changed(fragment_size=size),
            batches=2,
        ).step_seconds
        for size in ("auto", 4, 8, 16)
    )  # fmt: skip
    assert chosen <= 1.01 * min(fixed)


@pytest.mark.parametrize(
    "members",
    [
        pytest.param({"H100": 8, "H20": 8}, marks=pytest.mark.slow),
        pytest.param({"H100": 16, "H20": 16}, marks=pytest.mark.slow),
        pytest.param({"H100": 24, "H20": 8}, marks=pytest.mark.slow),
    ],
    ids=["few", "halves", "a quarter"],
)
def test_a_step_ahead_unlike_devices_generate_in_fragments_of_the_best_size(
    members: dict[str, int],
) -> None:
    ahead = RunSchedule(mode="fluid", max_staleness=1)
    chosen, *fixed = (
        simulate(
            QWEN, rollout={}, trainer=members, batches=6,
            schedule=ahead.changed(fragment_size=size),
        ).step_seconds
        for size in ("auto", 4, 8, 16)
    )  # fmt: skip
    assert chosen <= 1.01 * min(fixed)
