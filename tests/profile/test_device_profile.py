"""Measured calls become a cost profile: the fit of o and c, and whose seconds they are."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digenrl.trace.device_profile.device_costs import (
    MeasurementDevice,
    base_profile,
    device_kind,
    measured_profile,
)
from digenrl.trace.device_profile.fit import fit
from digenrl.trace.device_profile.ladder import Ladder, Rung, climb, powers_of_two
from digenrl.trace.device_profile.measure import DeviceMeasurement, Publication, RoleSwitch
from digenrl.trace.device_profile.models import ModelName
from digenrl.trace.profile import write_profile
from services.scheduler.costs.host import Launches
from services.scheduler.costs.profile import load_profile
from services.scheduler.costs.seconds import gradient_seconds, pass_seconds

SIZES = (1, 2, 4, 8, 16)
GIB = 2**30
PUBLICATION = Publication(
    num_bytes=418_000_000, digest="0" * 64, copy_seconds=0.1, digest_seconds=0.3,
    store_seconds=0.2, stage_seconds=0.1, pause_seconds=0.002,
)  # fmt: skip
SWITCH = RoleSwitch(to_generation_seconds=0.03, to_training_seconds=0.01, gradient_unchanged=True)


def calls(call: float, row: float, sizes: tuple[int, ...] = SIZES) -> Ladder:
    return Ladder(tuple(Rung(n, call + row * n, (24 + n) * GIB) for n in sizes))


def measured(
    generation: Ladder, training: Ladder, *, switch: RoleSwitch | None = SWITCH
) -> DeviceMeasurement:
    return DeviceMeasurement(
        generation=generation, training=training, switch=switch, publication=PUBLICATION,
        optimizer_seconds=0.02 if training.rungs else None,
    )  # fmt: skip


def on(name: str) -> MeasurementDevice:
    return MeasurementDevice(name=name, memory_gib=79.6, how=f"{name}: random weights.")


@given(
    call=st.floats(0, 1), row=st.floats(1e-4, 10), sizes=st.sets(st.sampled_from(SIZES), min_size=2)
)
def test_the_fit_finds_the_call_and_the_sample_again(
    call: float, row: float, sizes: set[int]
) -> None:
    rungs = calls(call, row, tuple(sorted(sizes))).rungs
    found = fit(rungs)
    if found.host:  # rows add next to nothing
        assert found.error(rungs) <= 0.02
    else:
        wanted = pytest.approx((call, row), rel=1e-6, abs=1e-6 * (call + row))
        assert (found.call, found.row) == wanted


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=5))
def test_the_fit_of_anything_is_a_cost(seconds: list[float]) -> None:
    rungs = [Rung(n, each, 0) for n, each in zip(SIZES, seconds, strict=False)]
    found = fit(rungs)
    assert found.call >= 0 and found.row >= 0 and found.seconds(1) > 0


def test_noise_of_a_hundredth_moves_a_whole_groups_seconds_by_no_more() -> None:
    noise = (1.01, 0.99, 1.0, 0.99, 1.01)
    rungs = [Rung(n, e * (0.03 + 0.085 * n), 0) for n, e in zip(SIZES, noise, strict=True)]
    assert fit(rungs).seconds(16) == pytest.approx(0.03 + 0.085 * 16, rel=0.01)


RECORDED = {
    "Qwen-Image, steps on the first host": ((0.248, 0.260, 0.309), 2),
    "Qwen-Image, steps": ((0.173, 0.180, 0.258), 2),
    "Qwen-Image, passes": ((1.165, 1.029, 0.984), 4),
    "FLUX.1, steps": ((0.127, 0.234, 0.448), 0),
    "FLUX.1, passes": ((0.680, 0.842, 1.468), 1),
}
"""Seconds for 1, 2 and 4 rows on an H200 (docs/gpu-day), and the rows up to which it was the host
that set the pace: 8,317 launches of a call of Qwen-Image, 5,107 of FLUX.1."""


@pytest.mark.parametrize("what", RECORDED)
def test_what_an_h200_took_is_fitted_and_the_host_s_pace_is_named(what: str) -> None:
    seconds, host_bound = RECORDED[what]
    rungs = [Rung(n, each, 0) for n, each in zip((1, 2, 4), seconds, strict=True)]
    found = fit(rungs)
    assert found.error(rungs) <= 0.1
    assert found.host_bound(rungs) == host_bound


def test_a_pass_that_the_host_paces_leaves_the_device_s_seconds_as_they_were() -> None:
    base, qwen = base_profile(ModelName.qwen_image), (1.165, 1.029, 0.984)
    passes = Ladder(tuple(Rung(n, each, GIB) for n, each in zip((1, 2, 4), qwen, strict=True)))
    taken = replace(
        measured(calls(0.05, 0.04), passes), launches=Launches(step=8000, training_pass=32000)
    )
    found = measured_profile(base, taken, on("NVIDIA H200"))
    assert found.host.training_launch_seconds == pytest.approx(1.07 / 32000, rel=0.01)
    assert found.host.step_launch_seconds == 0
    assert found.variants["lora"].rho == base.variants["lora"].rho
    assert "up to 4 rows" in found.sources["host.training_launch_seconds"].note


@given(host=st.floats(0.3, 0.5), row=st.floats(0.05, 0.06))
def test_a_fit_of_both_finds_both_again(host: float, row: float) -> None:
    rungs = [Rung(n, max(host, row * n), 0) for n in SIZES]
    found = fit(rungs)
    assert found.error(rungs) <= 0.03
    assert found.seconds(32) == pytest.approx(row * 32, rel=0.1)


def test_a_ladder_climbs_until_it_is_out_of_memory() -> None:
    import torch

    def measure(rows: int) -> Rung:
        if rows > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Rung(rows, 1.0, 0)

    found = climb(powers_of_two(17), measure)
    assert [rung.rows for rung in found.rungs] == [1, 2, 4]
    assert found.out_of_memory == 8


def test_memory_is_that_of_the_smallest_call_that_is_about_as_fast() -> None:
    ladder = calls(0.03, 0.0846)
    assert ladder.best.rows == 16
    assert ladder.frugal.rows == 8
    assert calls(0.001, 0.5).frugal.rows == 1


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA H20", "Some New Card"])
def test_a_training_pass_of_few_rows_takes_what_was_measured(name: str) -> None:
    found = measured_profile(
        base_profile(ModelName.flux1_dev), measured(calls(0.02, 0.1), calls(0.15, 0.3)), on(name)
    )
    profile = found.trained(found.variants["lora"])
    rate = found.devices[device_kind(name, list(found.devices))].training_speed
    for rows in (1, 4, 16):
        seconds = pass_seconds(profile, rows=rows) / rate
        assert seconds == pytest.approx(0.15 + 0.3 * rows, rel=2e-3)


def test_an_h100_s_seconds_are_the_profiles(tmp_path: Path) -> None:
    base = base_profile(ModelName.flux1_dev)
    found = measured_profile(
        base, measured(calls(0.02, 0.1), calls(0, 0.27)), on("NVIDIA H100 80GB HBM3")
    )
    path = tmp_path / f"{found.name}.json"
    write_profile(found, path)
    profile = load_profile(path)

    assert profile.name == "flux1-dev@H100"
    assert profile.rollout.call_seconds == pytest.approx(0.02)
    assert profile.rollout.sample_seconds == pytest.approx(0.1)
    assert profile.rollout.memory_gib == (24 + 4) and profile.variant.memory_gib == 25
    # What the profile says of training is what was measured: 16 samples of 9 rows.
    seconds = gradient_seconds(profile, "H100", 16)
    assert seconds == pytest.approx(16 * 9 * 0.27, rel=1e-3)
    assert pass_seconds(profile, rows=1) == pytest.approx(0.27, rel=1e-3)
    assert profile.variant.published_gb == pytest.approx(0.418)
    assert profile.variant.publish_seconds == pytest.approx(0.7)
    assert profile.variant.adopt_seconds == pytest.approx(0.002)
    assert profile.variant.switch_seconds == pytest.approx(0.02)
    assert {kind: profile.devices[kind] for kind in base.devices} == base.devices
    assert set(found.sources) == {*base.sources, "variants.lora.call_factor"}
    assert "16: 1.62 s" in found.sources["rollout.sample_seconds"].note
    unchanged = found.trained(found.variants["full"])
    assert unchanged.variant == base.variants["full"]


def test_a_known_device_of_another_speed_is_converted() -> None:
    base = base_profile(ModelName.flux1_dev)
    speed = base.devices["A100"].generation_speed
    found = measured_profile(
        base,
        measured(calls(0.02 / speed, 0.1 / speed), calls(0, 0.27 / speed)),
        on("NVIDIA A100-SXM4-80GB"),
    )
    assert found.rollout.sample_seconds == pytest.approx(0.1, rel=1e-3)
    profile = found.trained(found.variants["lora"])
    seconds = gradient_seconds(profile, "A100", 16)
    assert seconds == pytest.approx(16 * 9 * 0.27 / speed, rel=1e-3)
    for path, converted in (("variants.lora.rho", True), ("variants.lora.adopt_seconds", False)):
        assert ("Converted" in found.sources[path].note) is converted


def test_an_unknown_device_enters_with_the_speed_that_was_measured() -> None:
    base = base_profile(ModelName.flux1_dev)
    before = base.trained(base.variants["lora"])
    found = measured_profile(
        base, measured(calls(0, 0.2), calls(0, 0.9)), on("NVIDIA RTX 6000 Ada Generation")
    )
    device = found.devices["RTX-6000-Ada-Generation"]
    assert found.name == "flux1-dev@RTX-6000-Ada-Generation"
    assert found.sources["devices.RTX-6000-Ada-Generation"].kind == "measured"
    assert device.generation_speed == pytest.approx(before.forward_seconds / 0.2, rel=1e-3)
    profile = found.trained(found.variants["lora"])
    assert profile.forward_seconds == pytest.approx(before.forward_seconds, rel=1e-3)
    seconds = gradient_seconds(profile, "RTX-6000-Ada-Generation", 16)
    assert seconds == pytest.approx(16 * 9 * 0.9, rel=1e-3)


def test_what_did_not_fit_stays_as_it_was() -> None:
    base = base_profile(ModelName.qwen_image)
    found = measured_profile(
        base, measured(calls(0.05, 0.04), Ladder((), 1), switch=None), on("NVIDIA H100 80GB HBM3")
    )
    kept, lora = base.variants["lora"], found.variants["lora"]
    assert (lora.rho, lora.memory_gib, lora.switch_seconds, lora.optimizer_seconds) == (
        kept.rho, kept.memory_gib, kept.switch_seconds, kept.optimizer_seconds,
    )  # fmt: skip
    assert found.sources["variants.lora.rho"] == base.sources["variants.lora.rho"]
    nothing = measured_profile(
        base, measured(Ladder((), 1), Ladder((), 1), switch=None), on("NVIDIA L4")
    )
    assert nothing.rollout == base.rollout and nothing.devices["L4"].generation_speed == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090 D", "4090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("cpu", "cpu"),
    ],
)
def test_devices_have_the_names_of_the_profile(name: str, kind: str) -> None:
    assert device_kind(name, list(base_profile(ModelName.flux1_dev).devices)) == kind


def test_every_model_has_a_profile_to_begin_with() -> None:
    for model in ModelName:
        assert base_profile(model).name == model


def test_a_measured_profile_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.scheduler.costs import profile as costs

    found = measured_profile(
        base_profile(ModelName.wan21_14b), measured(calls(0.01, 0.2), calls(0, 0.7)),
        on("NVIDIA H200"),
    )  # fmt: skip
    write_profile(found, tmp_path / f"{found.name}.json")
    monkeypatch.setattr(costs, "PROFILES", tmp_path)
    assert costs.profile_names() == ["wan2.1-14b@H200"]
    assert load_profile("wan2.1-14b@H200").variant.rho == found.variants["lora"].rho
