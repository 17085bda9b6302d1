from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.planning.scheduler_load import scheduler_seconds
from digenrl.planning.splits import splits
from services.scheduler.core.tag.makespan import makespan
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import load_profile
from services.scheduler.costs.split import Split
from services.scheduler.sim.forecast import forecast, fragment_sizes, opening_situation
from services.scheduler.sim.profiled import simulate
from shared.recipe.schedule import RunSchedule

STRICT = RunSchedule(tag="auto")
ONE_STEP = STRICT.changed(max_staleness=1)
SEQUENTIAL = RunSchedule(mode="sequential")
profiles = st.sampled_from([
    load_profile(name, variant)
    for name in ("qwen-image", "flux1-dev", "wan2.1-14b", "hunyuanvideo")
    for variant in ("lora", "full")
])  # fmt: skip
kinds = st.sampled_from(["H100", "A100", "H20"])
schedules = st.sampled_from([STRICT, ONE_STEP, SEQUENTIAL])


@given(profiles, st.integers(1, 20), st.integers(1, 20), kinds, schedules)
def test_no_forecast_beats_the_bound(profile, generate, train, kind, schedule):  # type: ignore[no-untyped-def]
    split = Split({kind: generate}, {"H100": train * profile.variant.ranks})
    bound = floor_seconds(profile, split.devices)
    for size in (4, profile.shape.group_size):
        assert forecast(profile, split, size, schedule).seconds > bound


@given(profiles, st.integers(1, 20), st.integers(1, 20))
def test_asynchrony_and_help_never_make_a_forecast_slower(profile, generate, train):  # type: ignore[no-untyped-def]
    split = Split({"A100": generate}, {"H100": train * profile.variant.ranks})
    sequential = forecast(profile, split, 4, SEQUENTIAL).seconds
    gap = forecast(profile, split, 4, RunSchedule(tag=0)).seconds
    helped = forecast(profile, split, 4, STRICT).seconds
    assert helped <= gap * 1.005 and gap <= sequential
    without = forecast(profile, split, 4, RunSchedule(tag=0, max_staleness=1)).seconds
    assert without <= gap * 1.02  # but for a group that is generated in vain
    assert forecast(profile, split, 4, ONE_STEP).seconds <= without


@settings(max_examples=12)
@given(profiles, st.integers(2, 40), kinds, st.sampled_from([STRICT, ONE_STEP, SEQUENTIAL]))
def test_another_device_is_never_forecast_slower(profile, number, kind, schedule):  # type: ignore[no-untyped-def]
    def best(devices: dict[str, int]) -> float:
        return min(
            forecast(profile, split, size, schedule).seconds
            for split in splits(profile, devices)
            for size in fragment_sizes(profile, schedule)
        )

    whole = number * profile.variant.ranks
    assert best({"H100": whole, kind: whole + 1}) <= best({"H100": whole, kind: whole}) * 1.01


@pytest.mark.parametrize(
    ("name", "generate", "train", "size", "schedule"),
    [
        ("qwen-image", 24, 8, 4, STRICT),
        ("qwen-image", 2, 14, 8, STRICT),
        ("flux1-dev", 12, 20, 8, SEQUENTIAL),
        ("qwen-image", 23, 9, 8, ONE_STEP),
        pytest.param("flux1-dev", 4, 12, 8, STRICT, marks=pytest.mark.slow),
        pytest.param("wan2.1-14b", 8, 24, 4, STRICT, marks=pytest.mark.slow),
        pytest.param("hunyuanvideo", 14, 18, 12, ONE_STEP, marks=pytest.mark.slow),
        pytest.param("flux1-dev", 6, 10, 4, ONE_STEP, marks=pytest.mark.slow),
    ],
)
def test_forecasts_come_near_the_simulator(
    name: str, generate: int, train: int, size: int, schedule: RunSchedule
) -> None:
    profile = load_profile(name)
    split = Split({"H100": generate}, {"H100": train})
    found = forecast(profile, split, size, schedule)
    tag = profile.shape.groups if schedule is ONE_STEP else found.groups
    simulated = simulate(
        profile, rollout=split.rollout, trainer=split.trainer, batches=6,
        schedule=schedule.changed(fragment_size=size, tag=tag),
    )  # fmt: skip
    assert found.seconds == pytest.approx(simulated.step_seconds, rel=0.05)


def test_fixed_help_is_kept() -> None:
    profile, split = load_profile("qwen-image"), Split({"H100": 8}, {"H100": 24})
    for schedule in (STRICT.changed(tag=7), ONE_STEP.changed(tag=7)):
        assert forecast(profile, split, 8, schedule).groups == 7


def test_a_member_alone_waits_for_the_end_of_its_block() -> None:
    profile, split = load_profile("qwen-image"), Split({"H100": 8}, {"H100": 1})
    fixed = STRICT.changed(tag=7)
    tag_inputs = opening_situation(profile, split, 8, schedule=fixed)
    assert forecast(profile, split, 8, fixed).seconds == makespan(tag_inputs.tag_inputs, 7)


def test_the_scheduler_is_busy_longer_with_small_fragments_and_with_more_devices() -> None:
    profile = load_profile("flux1-dev")

    def busy(devices: int, size: int, mode: Literal["fluid", "disaggregated"] = "fluid") -> float:
        shape = profile.shape.model_copy(update={"groups": devices})
        schedule = RunSchedule(mode=mode, fragment_size=size)
        of_groups = profile.model_copy(update={"shape": shape})
        split = Split({"H100": devices - 1}, {"H100": 1})
        if mode == "fluid":
            split = Split({}, {"H100": devices})
        return scheduler_seconds(of_groups, split, schedule)

    # As was measured, with two fragments for each device.
    assert busy(512, 8) == pytest.approx(3.0, rel=0.1)
    assert busy(4096, 8) == pytest.approx(41, rel=0.1)
    assert busy(4096, 8, "disaggregated") == pytest.approx(8.3, rel=0.15)
    assert busy(32, 4) < 1
    assert busy(512, 4) > busy(512, 8)
    assert busy(2048, 8) > 4 * busy(512, 8)
