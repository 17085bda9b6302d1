from hypothesis import given
from hypothesis import strategies as st

from digenrl.planning.splits import excluded, splits
from services.scheduler.costs.profile import load_profile
from services.scheduler.costs.seconds import speed
from services.scheduler.costs.split import Split

KINDS = ("H100", "H200", "A100", "H20", "L40S", "4090")
profiles = st.sampled_from(
    [load_profile(name) for name in ("qwen-image", "flux1-dev", "wan2.1-14b", "hunyuanvideo")]
)
pools = st.dictionaries(st.sampled_from(KINDS), st.integers(0, 12), min_size=1)


@given(profiles, pools)
def test_every_device_that_holds_the_model_has_one_role_and_one_kind_is_split(profile, pool):  # type: ignore[no-untyped-def]
    able = {
        kind: count
        for kind, count in pool.items()
        if count and (speed(profile, kind, "rollout") or speed(profile, kind, "trainer"))
    }
    for split in splits(profile, pool):
        assert split.rollout and split.trainer
        assert {kind: count for kind, count in split.devices.items() if count} == able
        assert len(set(split.rollout) & set(split.trainer)) <= 1
        assert all(speed(profile, kind, "rollout") for kind in split.rollout)
        assert all(speed(profile, kind, "trainer") for kind in split.trainer)


def test_equal_devices_are_split_in_every_way() -> None:
    found = splits(load_profile("flux1-dev"), {"H100": 6})
    assert [split.rollout["H100"] for split in found] == [1, 2, 3, 4, 5]


def test_slow_devices_generate_before_fast_ones_do() -> None:
    found = splits(load_profile("flux1-dev"), {"H100": 3, "A100": 2})
    assert [str(split) for split in found] == [
        "1 A100 : 1 A100 + 3 H100",
        "2 A100 : 3 H100",
        "2 A100 + 1 H100 : 2 H100",
        "2 A100 + 2 H100 : 1 H100",
    ]


def test_the_kind_that_is_better_at_training_trains_first() -> None:
    # An H20 trains 1/3.3 and generates 1/3.5 as fast as an H100.
    found = splits(load_profile("flux1-dev"), {"H20": 1, "H100": 2})
    assert [str(split) for split in found] == ["1 H100 : 1 H100 + 1 H20", "2 H100 : 1 H20"]


def test_a_kind_that_cannot_train_generates() -> None:
    found = splits(load_profile("qwen-image"), {"L40S": 4, "H100": 2})
    assert [str(split) for split in found] == ["4 L40S : 2 H100", "4 L40S + 1 H100 : 1 H100"]


def test_devices_that_cannot_hold_the_model_are_left_out_with_the_reason() -> None:
    profile, devices = load_profile("qwen-image"), {"4090": 8, "H100": 2, "L40S": 1, "A100": 0}
    assert excluded(profile, devices) == {
        "4090": "qwen-image needs 41.5 GiB on a rollout device; 4090 has 23 GiB"
    }
    assert all("4090" not in split.devices for split in splits(profile, devices))


def test_too_few_devices_have_no_split() -> None:
    profile = load_profile("qwen-image")
    for devices in ({"H100": 1}, {"4090": 8}, {"L40S": 8}, {}):
        assert splits(profile, devices) == []


def test_many_devices_are_looked_at_in_steps() -> None:
    found = splits(load_profile("flux1-dev"), {"H100": 256})
    assert len(found) <= 64
    assert found[1].rollout["H100"] - found[0].rollout["H100"] == 4


def test_a_split_in_words() -> None:
    split = Split({"A100": 16, "H100": 2}, {"H100": 14})
    assert str(split) == "16 A100 + 2 H100 : 14 H100"
    assert split.devices == {"H100": 16, "A100": 16}
