"""Seconds of a call: by what its host launches, by the rows that a device holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.devices import H200_HOST
from services.scheduler.costs import fluid
from services.scheduler.costs.capacity import fitting_rows, pass_rows
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.host import HostCosts, Launches, parse_host_costs
from services.scheduler.costs.profile import Profile, load_profile
from services.scheduler.costs.seconds import (
    denoising_seconds,
    fragment_seconds,
    gradient_seconds,
    pass_seconds,
    passes_seconds,
    training_work,
)
from shared.errors import UserError

QWEN = load_profile("qwen-image")
COUNTED = Launches(step=10_000, training_pass=40_000)
HOST = HostCosts(step_launch_seconds=20e-6, training_launch_seconds=30e-6)
SLOWED = QWEN.model_copy(update={"launches": COUNTED, "host": HOST})


def holding(profile: Profile, rows: int, *sizes: int) -> Profile:
    """Return the costs with devices of 80 GB that hold so many rows, but for the allocator's."""
    variant = {"member_pass_gib": 79.0 - rows, "row_gib": 1.0, "pass_sizes": sizes}
    return profile.model_copy(update={"variant": profile.variant.model_copy(update=variant)})


def test_a_call_of_few_rows_takes_what_its_host_launches() -> None:
    assert denoising_seconds(SLOWED, 1) == pytest.approx(0.2)
    assert denoising_seconds(SLOWED, 16) == QWEN.step_seconds(16) > 0.2
    assert pass_seconds(SLOWED, 1) == pass_seconds(SLOWED, 2) == pytest.approx(1.2)
    assert pass_seconds(SLOWED, 16) == pass_seconds(QWEN, 16) > 1.2
    assert pass_seconds(SLOWED, 2, 0.25) == 4 * pass_seconds(QWEN, 2), "a slow device is slower"
    assert fragment_seconds(SLOWED, "H100", 1) > fragment_seconds(QWEN, "H100", 1)
    assert fragment_seconds(SLOWED, "H100", 16) == fragment_seconds(QWEN, "H100", 16)


def test_more_rows_than_fit_are_several_passes() -> None:
    small = holding(QWEN, 5)
    assert pass_rows(small, "H100", "member") == 5 and pass_rows(QWEN, "H100", "member") == 16
    assert passes_seconds(QWEN, 12, 5) == 2 * pass_seconds(QWEN, 5) + pass_seconds(QWEN, 2)
    assert fluid.piece_seconds(small, "H100", 12) == passes_seconds(QWEN, 12, 5)
    whole = gradient_seconds(small, "H100", 16)
    assert whole > gradient_seconds(QWEN, "H100", 16)
    assert whole == pytest.approx(32 / 5 * pass_seconds(QWEN, 5))
    assert pass_rows(holding(QWEN, 500), "H100", "member") == 16, "a group's"
    assert pass_rows(holding(QWEN, -5), "H100", "member") == 1, "the smallest is tried anyway"


def test_a_trainer_cuts_a_group_by_halves() -> None:
    small = holding(QWEN, 11, 2, 4, 8, 16, 32)
    assert fitting_rows(small, "H100", "member") == 11
    assert pass_rows(small, "H100", "member") == 8
    assert pass_rows(small, "H200", "member") == 16


@given(st.integers(1, 16), st.integers(1, 64))
def test_no_host_and_no_memory_make_the_floor_higher_or_a_pass_faster(fits: int, rows: int) -> None:
    slowed = holding(SLOWED, fits)
    assert training_work(slowed) == training_work(QWEN)
    assert floor_seconds(slowed, {"H100": 8}) == floor_seconds(QWEN, {"H100": 8})
    least = rows / 16 * pass_seconds(QWEN, 16)
    assert fluid.piece_seconds(slowed, "H100", rows) >= least * (1 - 1e-9)


@pytest.mark.parametrize("text", ["", "20", "a,b", "1,2,3", "-1,2"])
def test_microseconds_of_a_launch_are_two_numbers(text: str) -> None:
    with pytest.raises(UserError, match=r"--launch-us: .* is not two numbers"):
        parse_host_costs("--launch-us", text)


def test_every_profile_has_its_launches_and_an_h200_s_host_is_that_of_the_report() -> None:
    """A call of Qwen-Image took .173 s and a pass .984 to 1.165 s there, for 1, 2 and 4 rows."""
    launches = QWEN.launches
    assert launches is not None
    step = launches.step * H200_HOST.step_launch_seconds
    training = launches.training_pass * H200_HOST.training_launch_seconds
    assert training / step == pytest.approx(0.984 / 0.173, rel=0.1)
