import math
from dataclasses import replace
from statistics import mean

import pytest

from services.scheduler.core.lending import tag_inputs
from services.scheduler.core.state import LoanState, Plan, State, new_batch
from services.scheduler.core.tag.controller import Controller
from services.scheduler.core.tag.estimates import Costs, Estimate
from services.scheduler.costs.profile import VariantName, load_profile
from services.scheduler.costs.split import Split
from services.scheduler.sim.forecast import forecast, fragment_sizes
from services.scheduler.sim.lookahead import batch_seconds, cluster_of, look_ahead
from services.scheduler.sim.profiled import NEVER, simulate
from shared.recipe.schedule import RunSchedule
from tests import examples
from tests.scheduler.sim.situations import opening

MODELS = ("qwen-image", "flux1-dev", "wan2.1-14b", "hunyuanvideo")
VARIANTS: tuple[VariantName, ...] = ("lora", "full")
QUARTERS = (1, 2, 3)
"""Of the devices, that generate: generator-starved, even, trainer-starved."""


def _configuration(
    model: str, variant: VariantName, number: int, quarters: int
) -> tuple[Plan, State]:
    profile = load_profile(model, variant)
    generates = number * quarters // 4
    split = Split({"H100": generates}, {"H100": number - generates})
    schedule = RunSchedule(tag="auto")
    sizes = [size for size in fragment_sizes(profile, schedule) if size > 1]
    size = min(sizes, key=lambda size: forecast(profile, split, size, schedule).seconds)
    return opening(profile, split, size)


def _brute_force(plan: Plan, state: State, start: float) -> float:
    """The least over all numbers of groups in the same simulator; none that could win is left out.

    A trainer whose share is never short goes the same way with any larger one; and generating the
    other groups takes the rollout devices a time that no help shortens.
    """
    whole = cluster_of(plan, state, plan.num_groups)
    assert whole.world.run(NEVER, lambda: bool(whole.history.commit_times))
    best = min(start, whole.history.commit_times[0])
    taken = plan.num_groups * plan.group_size - whole.scheduler.state.tag.samples_left
    assert state.trainer is not None and plan.schedule.fixed_fragment is not None
    last = math.ceil((taken + plan.schedule.fixed_fragment) / plan.group_size)
    seen = tag_inputs(plan, state, state.trainer)
    rate = sum(1 / seconds for seconds in seen.rollout)
    for groups in range(min(last, plan.num_groups) + 1):
        generation = (plan.num_groups - groups) * seen.fragments_per_group / rate
        if generation + seen.train + seen.commit < best:
            best = min(best, batch_seconds(plan, state, groups, at_most=best))
    return best


Configuration = tuple[str, VariantName, int, int]
ALL: list[Configuration] = [
    (model, variant, number, quarters)
    for model in MODELS
    for variant in VARIANTS
    for number in (16, 32)
    for quarters in QUARTERS
]
FEW: list[Configuration] = [
    ("qwen-image", "lora", 32, 1),
    ("flux1-dev", "full", 16, 3),
    ("wan2.1-14b", "full", 32, 2),
    ("hunyuanvideo", "lora", 32, 1),
]
"""Every model, variant, size and split at least once."""


@pytest.mark.slow
@pytest.mark.parametrize("configurations", [FEW, ALL], ids=["few", "all"])
def test_the_look_ahead_is_as_good_as_trying_every_number_of_groups(
    configurations: list[Configuration],
) -> None:
    losses = {}
    for configuration in configurations:
        plan, state = _configuration(*configuration)
        groups = look_ahead(plan, state, 0.0)
        assert groups is not None
        seconds = batch_seconds(plan, state, groups)
        losses[configuration] = seconds / _brute_force(plan, state, seconds) - 1
    worst = max(losses, key=lambda configuration: losses[configuration])
    assert losses[worst] <= 0.03, worst
    assert mean(losses.values()) <= 0.01


def _starved(*, max_staleness: int = 0) -> tuple[Plan, State]:
    """The trainer has much time to help."""
    split = Split({"H100": 8}, {"H100": 24})
    return opening(load_profile("qwen-image"), split, 8, max_staleness=max_staleness)


def test_help_that_was_found_is_worth_it() -> None:
    plan, state = _starved()
    groups = look_ahead(plan, state, 0.0)
    assert groups is not None and 18 <= groups <= 27
    assert batch_seconds(plan, state, groups) < 0.5 * batch_seconds(plan, state, 0)


@pytest.mark.slow
def test_with_one_step_asynchrony_a_batch_is_one_of_many() -> None:
    plan, state = _starved(max_staleness=1)
    assert (
        look_ahead(plan, state, 0.0) is None
    )  # the share of independent devices is not looked for
    simulated = simulate(
        load_profile("qwen-image"), rollout={"H100": 8}, trainer={"H100": 24}, seed=None,
        schedule=RunSchedule(fragment_size=8, tag=32, max_staleness=1), causes=False,
    )  # fmt: skip
    assert batch_seconds(plan, state, 32) == pytest.approx(simulated.step_seconds, rel=0.06)
    assert state.trainer is not None
    together = state.with_worker(replace(state.trainer, independent_devices=False))
    groups = look_ahead(plan, together, 0.0)
    assert groups
    seconds = [batch_seconds(plan, together, k) for k in (0, groups)]
    assert seconds[1] < 0.6 * seconds[0]


def test_nothing_is_said_before_costs_are_known() -> None:
    plan, state = _starved()
    costs = state.costs
    for unknown in (
        Costs(),
        replace(costs, rollout={}, help=Estimate()),
        replace(costs, train=Estimate()),
        replace(costs, ready=Estimate()),
        replace(costs, commit=Estimate()),
    ):
        assert look_ahead(plan, replace(state, costs=unknown), 0.0) is None
    # A helper that was never seen at work is taken for an ordinary device.
    assert look_ahead(plan, replace(state, costs=replace(costs, help=Estimate())), 0.0) is not None


def test_nothing_is_said_where_there_is_nothing_to_choose() -> None:
    plan, state = _starved()
    assert state.trainer is not None
    assert look_ahead(examples.with_schedule(plan, mode="sequential"), state, 0.0) is None
    deaf = state.with_worker(replace(state.trainer, concurrency=0))
    assert look_ahead(plan, deaf, 0.0) is None
    for controller in (Controller(mode="off"), Controller(mode="fixed", groups=3)):
        assert look_ahead(plan, replace(state, tag=LoanState(controller=controller)), 0.0) is None


def test_what_has_happened_in_the_batch_does_not_matter() -> None:
    plan, state = _starved()
    later = replace(state, batches=(new_batch(plan, 7, 100.0),))
    assert look_ahead(plan, later, 130.0) == look_ahead(plan, state, 0.0)


def test_a_long_run_is_given_up() -> None:
    plan, state = _starved()
    seconds = batch_seconds(plan, state, 0)
    assert batch_seconds(plan, state, 0, at_most=seconds) == seconds
    assert batch_seconds(plan, state, 0, at_most=0.9 * seconds) == math.inf
