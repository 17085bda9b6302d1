"""Samples of a group that share their noise: costs are those of the network's rows, one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulation.colocated import colocated_seconds
from bench.simulation.figures import simulate
from services.scheduler.core.tag.estimates import Costs
from services.scheduler.core.unissued import full_size, next_size
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import Profile, Streaming, load_profile
from services.scheduler.costs.seconds import (
    fragment_seconds,
    generation_work,
    gradient_seconds,
    pass_seconds,
    row_seconds,
    training_work,
)
from services.scheduler.costs.shape import Shape, rollout_equivalents, training_equivalents
from services.scheduler.costs.sizes import GIB_TO_GB
from services.scheduler.costs.split import Split
from services.scheduler.sim.forecast import forecast
from services.scheduler.sim.profiled import steady_plan
from shared.recipe.schedule import RunSchedule

FLUX = load_profile("flux1-dev")
DIGITS = {"groups": 20, "group_size": 12, "updates": 2, "trained_steps": 1}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    steps, window = draw(st.integers(2, 20)), draw(st.integers(1, 6))
    start = draw(st.integers(0, steps - 1))
    shares = draw(st.booleans())
    return Shape(
        groups=4, group_size=draw(st.integers(1, 24)), steps=steps, trained_steps=window, updates=1,
        shared_steps=start + 1 if shares else 0.0, merged_steps=int(shares),
    )  # fmt: skip


def counting(shape: Shape, forwards: int) -> Profile:
    """A profile in which a row of the network takes a second, forward, and a trained one as well;
    and nothing else takes any time."""
    rollout = FLUX.rollout.model_copy(
        update={
            "call_seconds": 0.0,
            "sample_seconds": 1.0,
            "decode_seconds": 0.0,
            "reward_seconds": 0.0,
        }
    )
    variant = FLUX.variant.model_copy(update={"forwards_per_step": forwards, "rho": 1.0})
    return FLUX.model_copy(update={"shape": shape, "rollout": rollout, "variant": variant})


def generated_rows(shape: Shape, samples: int, forwards: int) -> int:
    """Goes through a fragment as a generator does: one state until the first stochastic step."""
    rows = 0
    for step in range(shape.steps):
        rows += forwards * (1 if step < shape.shared_steps else samples)
    return rows


def trained_rows(shape: Shape, samples: int, forwards: int) -> int:
    """Goes through a group as a trainer does: equal states of a step are one row."""
    begins = {
        (step, 0 if step < shape.merged_steps else sample)
        for sample in range(samples)
        for step in range(shape.trained_steps)
    }
    return forwards * len(begins)


@given(shapes(), st.integers(1, 24), st.sampled_from([1, 2]))
def test_costs_are_those_of_the_network_s_rows(shape: Shape, samples: int, forwards: int) -> None:
    profile = counting(shape, forwards)
    assert fragment_seconds(profile, "H100", samples) == pytest.approx(
        generated_rows(shape, samples, forwards)
    )
    assert gradient_seconds(profile, "H100", samples) == pytest.approx(
        trained_rows(shape, samples, forwards)
    )
    whole = trained_rows(shape, shape.group_size, forwards)
    assert training_work(profile) == pytest.approx(4 * whole)
    assert generation_work(profile) == pytest.approx(
        4 * generated_rows(shape, shape.group_size, forwards)
    )
    work = training_work(profile) + generation_work(profile)
    assert floor_seconds(profile, {"H100": 3}) == pytest.approx(work / 3)


@given(shapes(), st.integers(1, 24))
def test_equivalents_are_rows_with_a_backward_pass_as_two(shape: Shape, fragment: int) -> None:
    assert fragment * rollout_equivalents(shape, fragment) == pytest.approx(
        generated_rows(shape, fragment, 1)
    )
    rows = trained_rows(shape, shape.group_size, 1) / shape.group_size
    assert training_equivalents(shape, forward_only_passes=1) == pytest.approx(4 * rows)
    assert training_equivalents(shape, forward_only_passes=0) == pytest.approx(3 * rows)
    assert training_equivalents(shape, forward_only_passes=0, differentiated=0.5) == pytest.approx(
        2 * rows
    )


def _equivalents(shape: Shape) -> tuple[float, float]:
    """Return the forward-equivalents of a sample, and the share of training in them."""
    training = training_equivalents(shape, forward_only_passes=1)
    both = training + rollout_equivalents(shape, shape.group_size)
    return both, training / both


@given(shapes(), st.integers(1, 24))
def test_rows_for_all_samples_pay_for_calls_where_they_are_alone(
    shape: Shape, samples: int
) -> None:
    """What a call takes whatever its rows is spread over a group's samples: rows for all samples go
    along, or pay for calls of their own where there are no others."""
    profile = counting(shape, 1)
    called = {"call_seconds": 5.0}
    profile = profile.model_copy(update={"rollout": profile.rollout.model_copy(update=called)})
    apart = samples * (shape.trained_steps - shape.merged_steps)
    wanted = shape.merged_steps * (1 if apart else 6) + apart * (5 / shape.group_size + 1)
    assert gradient_seconds(profile, "H100", samples) == pytest.approx(wanted)
    generated = shape.shared_steps * 6 + (shape.steps - shape.shared_steps) * (5 + samples)
    assert fragment_seconds(profile, "H100", samples) == pytest.approx(generated)


def test_counts_are_those_of_the_study() -> None:
    """T 25, groups of 24: window 4, and a shared window of 1 at starts 0 to 11. The digits: T 10,
    window 3, groups of 24; and a tail, a shared window of 1 at 0 to 2, groups of 12."""
    large = Shape(groups=1, group_size=24, steps=25, trained_steps=4, updates=1)
    assert _equivalents(large)[0] == 41
    shared = {"trained_steps": 1, "shared_steps": 6.5, "merged_steps": 1}
    assert _equivalents(large.model_copy(update=shared))[0] == pytest.approx(18.9, abs=0.05)
    digits = Shape(groups=10, group_size=24, steps=10, trained_steps=3, updates=1)
    assert _equivalents(digits)[1] == pytest.approx(0.545, abs=0.001)
    best = Shape(**DIGITS, steps=6, shared_steps=2.0, merged_steps=1)
    assert _equivalents(best)[1] == pytest.approx(0.074, abs=0.001)


def test_a_device_that_waits_for_weights_waits_in_shared_steps_as_well() -> None:
    shape = Shape(**DIGITS, steps=6, shared_steps=2.0, merged_steps=1)
    streaming = Streaming(memory_gib=1, held_gib=1, host_gib=250 / GIB_TO_GB)
    profile = counting(shape, 1).model_copy(update={"streaming": {"H100": streaming}})
    waits = 250 / profile.devices["H100"].host_gb_per_second
    assert fragment_seconds(profile, "H100", 4) == pytest.approx(2 * max(waits, 1) + 4 * waits)
    assert fragment_seconds(profile, "H100", 12) == pytest.approx(2 * max(waits, 1) + 4 * 12)


@pytest.mark.parametrize("trainers", [1, 3])
def test_the_simulator_s_devices_do_the_work_that_is_counted(trainers: int) -> None:
    shape = Shape(
        **DIGITS | {"trained_steps": 2, "updates": 1}, steps=6, shared_steps=2.0, merged_steps=1
    )
    profile = counting(shape, 1)
    schedule = RunSchedule(tag=0, fragment_size=12)
    found = simulate(
        profile, rollout={"H100": 2}, trainer={"H100": trainers}, schedule=schedule, batches=2,
        seed=None,
    )  # fmt: skip
    busy = found.busy["trainer"]["train"] * trainers * found.step_seconds
    assert busy == pytest.approx(training_work(profile), rel=1e-6)
    generated = found.busy["rollout"]["generate"] * 2 * found.step_seconds
    assert generated == pytest.approx(generation_work(profile), rel=1e-6)


def test_fragments_of_whole_groups_pay_most() -> None:
    """The more is shared: with nothing shared, fragments are as they are for many devices."""
    split, schedule = Split({"H100": 8}, {"H100": 1}), RunSchedule(tag=0)

    def best(shared: float) -> int:
        shape = Shape(
            **DIGITS | {"groups": 16}, steps=10, shared_steps=shared, merged_steps=int(shared > 0)
        )
        sizes = (2, 3, 4, 6, 12)
        seconds = {n: forecast(counting(shape, 1), split, n, schedule).seconds for n in sizes}
        return min(sizes, key=lambda size: seconds[size])

    assert best(0.0) < 12
    assert best(8.0) == 12


def test_the_scheduler_cuts_groups_less_where_samples_share_steps() -> None:
    def sizes(shared: float) -> tuple[int, list[int]]:
        shape = Shape(**DIGITS, steps=10, shared_steps=shared)
        plan = steady_plan(shape, batches=1, schedule=RunSchedule())
        full = full_size(plan, 10)
        return full, [next_size(plan, 12, left, 4) for left in (96, 80, 60, 40, 20, 8)]

    assert sizes(0.0) == (4, [12, 10, 8, 5, 3, 3])
    full, later = sizes(6.0)
    assert full == 12
    assert later == [12, 12, 12, 6, 3, 3]
    assert all(12 % size == 0 for size in later)


def test_what_is_learned_of_small_fragments_holds_for_large_ones() -> None:
    """A device that computes 6 of 10 steps once takes 46 rows for 10 samples and 10 for one."""
    costs = Costs(shared_share=0.6, group_size=10)
    assert costs.whole_samples(10) == 10
    assert costs.whole_samples(1) / 10 == pytest.approx(10 / 46)
    assert Costs().whole_samples(3) == 3


def test_colocated_devices_share_as_well() -> None:
    shape = FLUX.shape.model_copy(update={"trained_steps": 1})
    apart = FLUX.model_copy(update={"shape": shape})
    merged = {"shared_steps": 1.0, "merged_steps": 1}
    together = FLUX.model_copy(update={"shape": shape.model_copy(update=merged)})
    before, after = (colocated_seconds(p, {"H100": 8}, "tuned") for p in (apart, together))
    saved = (16 * row_seconds(FLUX) - pass_seconds(FLUX, 1)) * shape.groups / 8
    assert before - after > saved * 0.99
