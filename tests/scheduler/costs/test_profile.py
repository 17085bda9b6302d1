import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.costs.capacity import fits
from services.scheduler.costs.profile import PROFILES, load_profile
from services.scheduler.costs.seconds import fragment_seconds
from shared.errors import UserError
from tests.scheduler.costs.tables import NAMES

names = st.sampled_from(NAMES)
TRACED = (
    "flux1-kontext", "flux2-dev", "flux2-klein-base-4b", "hunyuanvideo-1.5", "ltx-2",
    "qwen-image-edit", "wan2.1-i2v-14b", "z-image",
)  # fmt: skip
SIZED = ("sd35-medium", "sd35-large", "wan2.1-1.3b", "wan2.2-a14b", *TRACED)
"""Of which no figures are known that it could be compared with."""


def numbers(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


@pytest.mark.parametrize("name", [*NAMES, *SIZED])
def test_every_number_says_where_it_is_from_and_every_source_is_of_a_number(name: str) -> None:
    plain = json.loads((PROFILES / f"{name}.json").read_text())
    sources = plain.pop("sources")
    used = {
        next((key for key in sources if f"{path}.".startswith(f"{key}.")), path)
        for path in numbers(plain)
    }
    assert used == set(sources)


def test_profiles_of_the_repository_are_known_by_name() -> None:
    found = {path.stem for path in PROFILES.glob("*.json") if "@" not in path.stem}
    assert found == {*NAMES, *SIZED}
    assert all(load_profile(name).name == name for name in SIZED)
    for name in NAMES:
        assert load_profile(name).name == name
        assert load_profile(PROFILES / f"{name}.json") == load_profile(name)
        assert load_profile(name, "full").variant.ranks == 8


def test_an_unknown_profile_is_refused_with_the_known_names() -> None:
    with pytest.raises(UserError, match=r"no cost profile sdxl; known are flux1-dev, flux1-kon"):
        load_profile("sdxl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": {"groups": 0}}, r"shape\.groups: Input should be greater than 0"),
        ({"rollout": {"call_second": 1.0}}, r"rollout\.call_second: Extra inputs"),
        ({"rollout": {"call_seconds": "1"}}, r"rollout\.call_seconds: Input should be a valid nu"),
        ({"devices": {"H100": {"memory_gib": -1}}}, r"devices\.H100\.memory_gib"),
        ({"rollout": {"held_gib": math.inf}}, r"rollout\.held_gib: Input should be a finite"),
        ({"variants": {"lora": {"gathers": math.nan}}}, r"variants\.lora\.gathers: Input should"),
        ({"variants": {"lora": {"training_gib": -1.0}}}, r"training_gib: Input should be greater"),
    ],
)
def test_a_fault_in_a_file_is_one_line_with_its_place(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    def merged(plain: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
        inner = {k: merged(plain[k], v) if isinstance(v, dict) else v for k, v in change.items()}
        return {**plain, **inner}

    plain = json.loads((PROFILES / "qwen-image.json").read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(merged(plain, change)))
    with pytest.raises(UserError, match=message) as caught:
        load_profile(path)
    assert "\n" not in str(caught.value)


def test_all_weights_that_a_file_has_no_costs_of_follow_from_its_network(tmp_path: Path) -> None:
    plain = json.loads((PROFILES / "qwen-image.json").read_text())
    known = plain["variants"].pop("full")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(plain))
    found = load_profile(path, "full").variant
    assert found.rho == known["rho"]
    assert found.published_gb == pytest.approx(known["published_gb"], rel=0.01)
    assert found.publish_seconds == pytest.approx(known["publish_seconds"], rel=0.03)
    path.write_text(json.dumps({**plain, "memory": None}))
    with pytest.raises(UserError, match="no variant full"):
        load_profile(path, "full")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UserError, match="no device kind V100 in qwen-image; H100"):
        fragment_seconds(load_profile("qwen-image"), "V100", 1)


def test_qwen_rollouts_take_what_was_measured() -> None:
    """verl-omni's rows, on 4 devices: 226.4 s one at a time, 107.9 s batched; 60 s of rewards."""
    profile = load_profile("qwen-image")
    costs = profile.rollout

    def denoising(samples: int) -> float:
        seconds = fragment_seconds(profile, "H100", samples)
        return seconds - samples * (costs.decode_seconds + costs.reward_seconds)

    assert 128 * denoising(1) == pytest.approx(226.4, rel=0.01)
    assert 4 * denoising(32) == pytest.approx(107.9, rel=0.01)
    assert 128 * costs.reward_seconds == pytest.approx(60, rel=0.01)


@given(names, st.sampled_from(["H100", "A100", "H20", "L40S"]), st.integers(1, 64))
def test_a_larger_fragment_takes_longer_but_less_per_sample(
    name: str, kind: str, samples: int
) -> None:
    profile = load_profile(name)
    seconds, more = (fragment_seconds(profile, kind, n) for n in (samples, samples + 1))
    assert seconds < more
    assert more / (samples + 1) < seconds / samples


def test_a_device_that_is_too_small_is_refused_with_the_sizes() -> None:
    profile = load_profile("qwen-image")
    assert fits(profile, "H100", "trainer") is None
    assert fits(profile, "L40S", "rollout") is None
    reason = "qwen-image needs 41.5 GiB on a rollout device; 4090 has 23 GiB"
    assert fits(profile, "4090", "rollout") == reason
    assert fits(profile, "L40S", "trainer") is not None
    assert fragment_seconds(profile, "4090", 1) == math.inf
