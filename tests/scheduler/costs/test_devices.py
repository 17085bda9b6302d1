"""Kinds that no profile has: forecasts from data sheets, and any other by its memory."""

import pytest

from digenrl.planning.hosts import add_kinds, parse_hosts
from services.scheduler.costs.devices import FORECASTS, forecast, kind_named, with_sized
from services.scheduler.costs.profile import load_profile, profile_names
from shared.errors import UserError

FLUX = load_profile("flux1-dev")


def test_every_profile_has_the_kinds_of_data_sheets_and_keeps_its_own() -> None:
    for name in profile_names():
        devices = load_profile(name).devices
        assert devices.keys() >= {"5090", "3090", "A6000", "L40", "B200", "RTX-PRO-6000"}
        assert all("forecast from the data sheet" in devices[kind].note for kind in FORECASTS)
        assert devices["H100"].note == "" and devices["H100"].generation_speed == 1
    memory = {kind: each.memory_gib for kind, each in FORECASTS.items()}
    assert memory == {
        "5090": 31, "3090": 23, "4070": 11.5, "A6000": 47, "L40": 44, "B200": 178,
        "RTX-PRO-6000": 94,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "sheet", "ratio"),
    [
        ("A100", (312, 2039), 1.01),
        ("L40S", (362.05, 864), 1.11),
        ("4090", (165.2, 1008), 0.87),
        ("H20", (148, 4000), 1.48),
    ],
)
def test_the_rule_offorecasts_agrees_with_the_profiles_as_its_docstring_says(
    kind: str, sheet: tuple[float, float], ratio: float
) -> None:
    found = forecast(*sheet, memory_gib=1).generation_speed
    assert found / FLUX.devices[kind].generation_speed == pytest.approx(ratio, abs=0.01)


@pytest.mark.parametrize(
    "word", ["rtx pro 6000", "RTX-PRO-6000", "pro6000", "NVIDIA RTX PRO 6000", "rtx_pro_6000"]
)
def test_a_kind_is_named_as_people_write_it(word: str) -> None:
    assert kind_named(FLUX.devices, word) == "RTX-PRO-6000"
    assert kind_named(FLUX.devices, "GeForce RTX 4090") == "4090"
    assert kind_named(FLUX.devices, "L40") == "L40" and kind_named(FLUX.devices, "l40s") == "L40S"
    assert kind_named(FLUX.devices, "V100") is None


def test_any_other_kind_takes_part_by_its_memory_at_the_slowest_speed() -> None:
    text = "mine=32GiB*6, RTX 4090=47.5gib, h100x8*2"
    profile = add_kinds(text, FLUX)
    assert parse_hosts("--devices", text, profile, host_gpus=8).devices == {
        "mine": 6, "4090": 1, "H100": 16,
    }  # fmt: skip
    mine, modded = profile.devices["mine"], profile.devices["4090"]
    slowest = min(each.training_speed for each in FLUX.devices.values())
    assert (mine.memory_gib, mine.training_speed) == (32, slowest)
    assert "unknown" in mine.note and with_sized(FLUX.devices, "h100=8") == FLUX.devices
    assert (modded.memory_gib, modded.note) == (47.5, "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h1000=8", "knows no h1000 (did you mean H100?); known are H100, "),
        ("5900=1", "(did you mean 5090?)"),
        ("mine=2", "and any other by its memory, e.g. mine=32GiB*4"),
        ("mine=32GB", "1 or more, or the memory, e.g. 32GiB"),
    ],
)
def test_an_unknown_kind_is_refused_with_the_nearest_and_with_what_to_write(
    text: str, said: str
) -> None:
    with pytest.raises(UserError) as refused:
        parse_hosts("--devices", text, add_kinds(text, FLUX), host_gpus=8)
    assert said in str(refused.value)
