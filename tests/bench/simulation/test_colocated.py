import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulation.colocated import BASELINES, Baseline, colocated_seconds, whole_shares
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import load_profile
from tests.scheduler.costs.tables import HETEROGENEOUS, HOMOGENEOUS, NAMES, Row


@pytest.mark.parametrize("row", [*HOMOGENEOUS, *HETEROGENEOUS], ids=str)
def test_the_baselines_are_the_studys(row: Row) -> None:
    profile = load_profile(row.profile, row.variant)
    expected = zip(BASELINES, (row.oldest, row.batched, row.tuned), strict=True)
    for baseline, seconds in expected:
        if seconds is not None:
            found = colocated_seconds(profile, row.devices, baseline)
            assert found == pytest.approx(seconds, rel=0.02), baseline


def test_the_baselines_come_near_what_was_measured() -> None:
    """verl-omni's published steps, to whose totals no constant was fitted."""
    lora, full = load_profile("qwen-image"), load_profile("qwen-image", "full")
    assert colocated_seconds(lora, {"H100": 4}, "2026-06") == pytest.approx(420, rel=0.03)
    assert colocated_seconds(lora, {"H100": 4}, "batched") == pytest.approx(326, rel=0.05)
    assert colocated_seconds(full, {"H200": 4}, "2026-06") == pytest.approx(250, rel=0.16)


@given(
    name=st.sampled_from(NAMES),
    fast=st.integers(1, 24),
    slow=st.integers(0, 24),
    kind=st.sampled_from(["A100", "H20", "L40S", "4090"]),
)
def test_every_baseline_is_slower_than_the_next_and_than_the_floor(
    name: str, fast: int, slow: int, kind: str
) -> None:
    profile, devices = load_profile(name), {"H100": fast, kind: slow}
    oldest, batched, tuned = (colocated_seconds(profile, devices, each) for each in BASELINES)
    # A batch of samples has a longer tail than samples one by one, which video gains little for.
    assert oldest > batched * 0.995
    assert batched > tuned > floor_seconds(profile, devices)


@given(name=st.sampled_from(NAMES), slow=st.integers(1, 32), baseline=st.sampled_from(BASELINES))
def test_slow_devices_are_left_out_of_the_lock_step_rather_than_waited_for(
    name: str, slow: int, baseline: Baseline
) -> None:
    profile = load_profile(name)
    alone = colocated_seconds(profile, {"H100": 16}, baseline)
    assert colocated_seconds(profile, {"H100": 16, "L40S": slow}, baseline) <= alone


def test_equal_devices_that_both_roles_fit_are_needed() -> None:
    profile = load_profile("qwen-image")
    assert colocated_seconds(profile, {"L40S": 16}, "tuned") == math.inf
    assert colocated_seconds(profile, {}, "tuned") == math.inf
    alone = colocated_seconds(profile, {"H100": 16}, "tuned")
    assert colocated_seconds(profile, {"L40S": 16, "H100": 16}, "tuned") == alone


@given(
    st.integers(0, 200),
    st.lists(st.tuples(st.integers(1, 8), st.floats(0.1, 5)), min_size=1, max_size=4),
)
def test_whole_shares_end_as_soon_as_can_be(items: int, kinds: list[tuple[int, float]]) -> None:
    devices = {str(index): count for index, (count, _) in enumerate(kinds)}
    seconds = {str(index): each for index, (_, each) in enumerate(kinds)}
    shares = whole_shares(items, devices, seconds)
    end = max(share * seconds[kind] for kind, share in shares.items())
    assert sum(shares[kind] * devices[kind] for kind in shares) >= items

    def done_before_the_end(kind: str) -> int:
        share = shares[kind] + 2
        while share * seconds[kind] >= end:
            share -= 1
        return share * devices[kind]

    assert items == 0 or sum(map(done_before_the_end, devices)) < items
