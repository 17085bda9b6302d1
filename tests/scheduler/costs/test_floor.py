import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import Device, Profile, load_profile
from services.scheduler.costs.seconds import generation_work, training_work
from tests.scheduler.costs.bounds import split_bound
from tests.scheduler.costs.tables import HETEROGENEOUS, HOMOGENEOUS, NAMES, Row

KINDS = ("H100", "A100", "H20", "L40S")
PROFILES = [load_profile(name, variant) for name in NAMES for variant in ("lora", "full")]

profiles = st.sampled_from(PROFILES)
pools = st.dictionaries(st.sampled_from(KINDS), st.integers(0, 12), min_size=1)
speeds = st.floats(0.05, 2)


@st.composite
def invented(draw: st.DrawFn) -> Profile:
    """A profile whose devices are unlike at generating and training."""
    devices = {
        kind: Device(generation_speed=draw(speeds), training_speed=draw(speeds), memory_gib=80)
        for kind in KINDS
    }
    return draw(profiles).model_copy(update={"devices": devices})


@pytest.mark.parametrize("row", HOMOGENEOUS, ids=str)
def test_the_floor_is_the_studys(row: Row) -> None:
    profile = load_profile(row.profile, row.variant)
    assert floor_seconds(profile, row.devices) == pytest.approx(row.floor, rel=0.01)


@pytest.mark.parametrize("row", HETEROGENEOUS, ids=str)
def test_the_floor_of_unequal_devices_is_the_studys(row: Row) -> None:
    found = floor_seconds(load_profile(row.profile), row.devices)
    half_a_unit = 0.5
    assert abs(found - row.floor) <= 0.01 * row.floor + half_a_unit


@given(profiles, st.integers(1, 64))
def test_equal_devices_share_all_work(profile: Profile, number: int) -> None:
    work = generation_work(profile) + training_work(profile)
    assert floor_seconds(profile, {"H100": number}) == pytest.approx(work / number)


@given(invented(), pools, pools)
def test_no_split_beats_the_floor(
    profile: Profile, rollout: dict[str, int], trainer: dict[str, int]
) -> None:
    together = {kind: rollout.get(kind, 0) + trainer.get(kind, 0) for kind in KINDS}
    floor = floor_seconds(profile, together)
    assert floor <= split_bound(profile, rollout, trainer) * (1 + 1e-9)


@given(invented(), pools)
def test_the_floor_is_the_linear_programs_dual(profile: Profile, pool: dict[str, int]) -> None:
    """The optimum by another way: the Lagrangian bound, maximized over its one multiplier."""
    generation, training = generation_work(profile), training_work(profile)

    def bound(price: float) -> float:
        work = price * generation + (1 - price) * training
        rate = sum(
            count
            * max(
                price * profile.devices[kind].generation_speed,
                (1 - price) * profile.devices[kind].training_speed,
            )
            for kind, count in pool.items()
        )
        return work / rate if rate else math.inf

    # The bound is largest where some kind is indifferent between its two tasks.
    prices = [
        device.training_speed / (device.generation_speed + device.training_speed)
        for device in profile.devices.values()
    ]
    assert floor_seconds(profile, pool) == pytest.approx(max(map(bound, prices)), rel=1e-6)


@given(invented(), pools, st.sampled_from(KINDS))
def test_another_device_never_raises_the_floor(
    profile: Profile, pool: dict[str, int], kind: str
) -> None:
    more = {**pool, kind: pool.get(kind, 0) + 1}
    assert floor_seconds(profile, more) <= floor_seconds(profile, pool) * (1 + 1e-9)


def test_one_device_more_of_the_same_kind_lowers_the_floor() -> None:
    profile = load_profile("qwen-image")
    floors = [floor_seconds(profile, {"H100": number}) for number in range(1, 33)]
    assert floors == sorted(floors, reverse=True) and len(set(floors)) == 32


def test_a_device_too_small_for_the_model_counts_for_nothing() -> None:
    profile = load_profile("qwen-image")
    alone = floor_seconds(profile, {"H100": 16})
    assert floor_seconds(profile, {"H100": 16, "4090": 16}) == alone


def test_a_task_without_a_device_never_ends() -> None:
    profile = load_profile("qwen-image")
    assert floor_seconds(profile, {}) == math.inf
    # An L40S holds the model to generate, not to train.
    assert floor_seconds(profile, {"L40S": 16}) == math.inf
    assert split_bound(profile, {"H100": 16}, {"L40S": 16}) == math.inf
    assert split_bound(profile, {"L40S": 16}, {"H100": 16}) < math.inf
