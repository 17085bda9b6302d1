"""Devices behind slow lines decline the work that would make batches longer, and say why."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core import participation
from services.scheduler.core.device_queues import weights_wait
from services.scheduler.core.state import BatchState, State
from services.scheduler.core.tag.estimates import Costs
from tests import examples
from tests.scheduler.core.slow_lines import NEAR_MBIT, Member, SlowLines

MB = 10**6


@dataclass(frozen=True)
class Model:
    sum_bytes: int
    sample_s: float
    group_s: float
    sample_bytes: int


FLUX = Model(418 * MB, 12.0, 30.0, 2 * MB)
SD3 = Model(75 * MB, 2.0, 4.6, MB)
QWEN = Model(1686 * MB, 6.0, 16.0, 2 * MB)


def simulated(
    model: Model,
    near: int,
    far: int,
    mbits: float,
    *,
    service: str = "trainer",
    changes: Sequence[tuple[int, float]] = (),
    by_group: bool = False,
    batches: int = 4,
    updates: int = 1,
    restarts_at: int | None = None,
    **schedule: Any,
) -> SlowLines:
    """A run with ``near`` members, four rollout devices as well unless members generate, and
    ``far`` devices behind lines of so many Mbit/s; ``changes``: from a batch on, of so many."""
    mode = schedule.get("mode", "fluid")
    plan = examples.plan(
        num_groups=16, group_size=8, num_batches=batches, fragment_size="auto",
        **{"mode": mode, **schedule},
    )  # fmt: skip
    members = [Member(f"near-{n}-a", NEAR_MBIT, model.sample_s, model.group_s) for n in range(near)]
    others = 4 if mode == "disaggregated" else 0
    members += [
        Member(f"rollout-{n}-a", NEAR_MBIT, model.sample_s, model.group_s, "rollout")
        for n in range(others)
    ]
    members += [
        Member(f"far-{n}-a", mbits, model.sample_s, model.group_s, service) for n in range(far)
    ]
    run = SlowLines(
        replace(plan, trained_steps=6, updates=updates),
        {each.address: each for each in members}, model.sum_bytes, by_group, model.sample_bytes,
        [(batch, f"far-{n}-a", rate) for batch, rate in changes for n in range(far)], restarts_at,
    )  # fmt: skip
    state = run.run(1e7)
    assert state.phase == "finished", state.failure
    return run


def batch_seconds(run: SlowLines) -> list[float]:
    """Seconds of each batch but the first. With one-step asynchrony a batch is generated during the
    batch before, so the mean of two counts."""
    seconds = run.seconds_per_batch()[1:]
    if run.plan.early_groups:
        return [(first + second) / 2 for first, second in itertools.pairwise(seconds)]
    return seconds


@cache
def usual_seconds(model: Model, near: int, **schedule: Any) -> float:
    """Seconds of a batch without far devices."""
    return max(batch_seconds(simulated(model, near, 0, NEAR_MBIT, **schedule)))


def slowdowns(run: SlowLines, usual: float) -> list[float]:
    """Seconds of each batch but the first, over the usual ones."""
    return [each / usual for each in batch_seconds(run)]


def reasons(state: State) -> set[tuple[str, str]]:
    far = (each for each in state.workers.values() if each.name.startswith("far"))
    return {(each.no_pieces, each.no_fragments) for each in far}


@pytest.mark.parametrize(
    ("model", "near", "far", "mbits", "more"),
    [
        (FLUX, 8, 1, 100, {"updates": 2}),
        (FLUX, 8, 8, 30, {}),
        (SD3, 8, 1, 1, {"by_group": True}),
        (FLUX, 8, 1, 10, {"mode": "disaggregated", "service": "rollout", "tag": 0}),
        (QWEN, 8, 1, 300, {}),
        (SD3, 8, 1, 1, {"mode": "disaggregated", "service": "rollout"}),
        pytest.param(QWEN, 8, 8, 300, {"max_staleness": 1}, marks=pytest.mark.slow),
        *(
            pytest.param(model, near, far, mbits, more, marks=pytest.mark.night)
            for model in (FLUX, SD3, QWEN)
            for near, far in ((1, 1), (8, 1), (8, 8), (32, 8))
            for mbits in (1000, 300, 100, 30, 10, 1)
            for more in ({}, {"by_group": True}, {"updates": 2}, {"max_staleness": 1})
        ),
    ],
    ids=str,
)
def test_after_the_first_batch_far_devices_make_none_slower(
    model: Model, near: int, far: int, mbits: float, more: dict[str, Any]
) -> None:
    run = simulated(model, near, far, mbits, **more)
    assert max(slowdowns(run, usual_seconds(model, near, **more))) < 1.02
    for batch in range(4):
        rounds = [each for each in run.rounds if each.batch == batch]
        assert len(rounds) <= 3 * run.plan.updates


def test_far_devices_that_help_are_kept() -> None:
    assert slowdowns(simulated(FLUX, 8, 8, 100), usual_seconds(FLUX, 8))[-1] < 0.8


def test_a_member_that_only_generates_says_what_its_sums_would_take() -> None:
    run = simulated(FLUX, 8, 1, 100)
    assert run.state.workers["far-0-a"].declines == (
        "generates only: its sums would take 33 s at 100 Mbit/s"
    )
    assert (3, "far-0-a") in run.generated
    run = simulated(FLUX, 8, 1, 10)
    assert run.state.workers["far-0-a"].declines == (
        "takes no part: its sums would take 334 s at 10 Mbit/s"
    )


@pytest.mark.parametrize(("before", "after"), [(100, 10), (10, 1000)])
def test_from_the_third_batch_after_a_change_of_a_line_far_devices_make_none_slower(
    before: float, after: float
) -> None:
    """A device is given work again by the rates of the versions that it fetches."""
    run = simulated(FLUX, 8, 8, before, changes=[(3, after)], batches=10)
    found = slowdowns(run, usual_seconds(FLUX, 8))
    assert max(found[4:]) < 1.02
    if after > before:
        assert found[-1] < 0.65
        assert reasons(run.state) == {("", "")}


def test_a_restarted_scheduler_knows_lines_before_it_gives_work() -> None:
    """Workers report all that they have transferred; nobody reports what their work takes. The one
    with the slow line reports two seconds before the others."""
    run = simulated(FLUX, 8, 1, 10, restarts_at=2)
    assert max(slowdowns(run, usual_seconds(FLUX, 8))) < 1.02
    assert run.state.workers["far-0-a"].declines == (
        "takes no part: its sums would take 334 s at 10 Mbit/s"
    )


def test_noise_of_fast_lines_costs_no_device_its_work() -> None:
    plan = examples.plan(num_groups=16, group_size=8, num_batches=4, mode="fluid")
    members = [
        Member(f"near-{n}-a", rate, FLUX.sample_s, FLUX.group_s)
        for n, rate in enumerate((700, 800, 900, 1000, 1100, 1200, 1300, 1400))
    ]
    run = SlowLines(
        replace(plan, trained_steps=6), {each.address: each for each in members},
        FLUX.sum_bytes, False, FLUX.sample_bytes,
    )  # fmt: skip
    state = run.run(1e7)
    assert state.phase == "finished"
    assert not any(each.declines for each in state.workers.values())
    assert all(len(each.shares) == 8 for each in run.rounds)


def test_a_device_that_declines_work_does_it_if_nobody_else_can() -> None:
    run = simulated(FLUX, 2, 1, 1)
    far = run.state.workers["far-0-a"]
    assert far.no_pieces and far.no_fragments
    left = {"far-0-a": far}
    state = replace(run.state, workers=type(run.state.workers)(left))
    again = participation.readmit_last(run.plan, state, None, 0.0).workers["far-0-a"]
    assert (again.no_pieces, again.no_fragments) == ("", "")


@pytest.mark.parametrize(("mbits", "kept"), [(14, False), (30, True)])
def test_late_devices_generate_if_they_gain_enough(mbits: float, kept: bool) -> None:
    """Without them a batch is generated in 256 s; a version takes 239 or 111 s."""
    pool: dict[str, Any] = {"service": "rollout", "mode": "disaggregated", "tag": 0}
    state = simulated(FLUX, 2, 8, mbits, **pool).state
    wait = "" if kept else "takes no part: a version takes 239 s to arrive"
    far = (each for each in state.workers.values() if each.name.startswith("far"))
    assert {each.declines for each in far} == {wait}


def test_schedules_start_when_weights_are_there() -> None:
    """A version takes 111 s. Work that begins later goes to groups that are generated later."""
    pool: dict[str, Any] = {"mode": "disaggregated", "tag": 0}
    run = simulated(FLUX, 2, 8, 30, service="rollout", **pool)
    assert max(slowdowns(run, usual_seconds(FLUX, 2, **pool))) < 0.87


def test_a_device_of_which_nothing_is_known_is_waited_for_by_nobody() -> None:
    """A new device has fetched a version that is no longer the newest; its rate comes later."""
    run = simulated(FLUX, 2, 1, 100, service="rollout", mode="disaggregated", tag=0, batches=2)
    state, policy = run.state, examples.policy(1)
    batch = BatchState(index=1, groups=(), opened_at=1000.0)
    newcomer = replace(state.workers["far-0-a"], address="new-a", name="new", version=0)
    state = replace(state, policy=policy, batches=(batch,))
    assert weights_wait(state, newcomer, batch.opened_at) == math.inf
    assert weights_wait(state, replace(newcomer, version=1), batch.opened_at) == 0
    measured = replace(state, costs=state.costs.observe_link("new-a", None, 8e-8))
    assert weights_wait(measured, newcomer, batch.opened_at) == pytest.approx(33.4, rel=0.01)


@given(st.lists(st.floats(0.9, 1.1), min_size=5, max_size=5), st.floats(1, 1000))
def test_a_line_s_rate_is_known_within_15_percent_after_five_transfers(
    noise: list[float], mbits: float
) -> None:
    costs, each = Costs(), 8 / (mbits * 1e6)
    for factor in noise:
        costs = costs.observe_link("far", None, factor * each)
    assert costs.down_seconds("far") == pytest.approx(each, rel=0.15)


def test_five_transfers_show_a_drop_of_a_line_and_one_slow_transfer_is_noise() -> None:
    costs = Costs()
    for _ in range(20):
        costs = costs.observe_link("far", 8e-8, 8e-8)
    costs = costs.observe_link("far", 8e-7, 8e-7)
    assert costs.sum_seconds("far") == pytest.approx(1.6e-7)
    for _ in range(4):
        costs = costs.observe_link("far", 8e-7, 8e-7)
    assert costs.up_seconds("far") == pytest.approx(8e-7, rel=0.15)


def test_the_way_up_of_a_device_that_sends_nothing_changes_as_its_way_down() -> None:
    costs = Costs()
    for _ in range(5):
        costs = costs.observe_link("far", 8e-7, 8e-8)
    for _ in range(12):
        costs = costs.observe_link("far", None, 8e-9, sends=False)
    assert costs.up_seconds("far") == pytest.approx(8e-8, rel=0.1)
