"""What devices need, by how a run holds its model."""

from dataclasses import replace

import pytest

from digenrl.trace.memory import (
    DECODING_PEAK,
    MEMORY_SHARE,
    ModelUse,
    encoder_needs,
    member_needs,
    rollout_needs,
    trainer_needs,
    usual,
    with_memory,
)
from services.scheduler.costs.capacity import fits, holds_fragments
from services.scheduler.costs.profile import Profile, load_profile
from services.scheduler.costs.seconds import fragment_seconds, pass_seconds, speed
from services.scheduler.costs.sizes import GIB_TO_GB, Memory
from shared.models.memory import TrainedSets

FLUX = load_profile("flux1-dev")


def memory_of(profile: Profile) -> Memory:
    assert profile.memory is not None
    return profile.memory


TABLE = memory_of(FLUX)
USUAL = usual(TABLE)


def all_weights(**changes: object) -> ModelUse:
    return replace(USUAL, rank=0, **changes)  # type: ignore[arg-type]


def test_without_text_encoders_a_device_needs_as_much_less_as_an_encoder_needs() -> None:
    apart = replace(USUAL, encodes=False)
    text = encoder_needs(TABLE, USUAL).total
    assert text == TABLE.text_gib
    for needs in (rollout_needs, member_needs):
        assert needs(TABLE, USUAL).total - needs(TABLE, apart).total == pytest.approx(text)
    assert trainer_needs(TABLE, USUAL) == trainer_needs(TABLE, apart)


def test_a_streamed_network_is_in_the_host_s_memory() -> None:
    resident, streamed = USUAL, replace(USUAL, streams=True)
    here, there = rollout_needs(TABLE, resident), rollout_needs(TABLE, streamed)
    assert (here.network, here.host) == (TABLE.network_gib, 0)
    assert (there.network, there.host) == (TABLE.streamed_gib, TABLE.network_gib)
    assert there.total == pytest.approx(here.total - here.network + TABLE.streamed_gib)
    assert "of its host's memory" in str(there) and "host" not in str(here)
    assert trainer_needs(TABLE, resident) == trainer_needs(TABLE, streamed)


@pytest.mark.parametrize(("weights", "share"), [("bf16", 1.0), ("int8", 0.51), ("nf4", 0.275)])
def test_quantised_weights_take_their_bytes_and_their_scales(weights: str, share: float) -> None:
    quantised = replace(USUAL, weights=weights)  # type: ignore[arg-type]
    network = rollout_needs(TABLE, quantised).network
    assert network == pytest.approx(share * TABLE.network_gib, rel=0.02)
    assert trainer_needs(TABLE, quantised) == trainer_needs(TABLE, USUAL)


@pytest.mark.parametrize(("base", "share"), [("int8", 0.51), ("nf4", 0.275)])
def test_a_quantised_base_is_that_of_every_device(base: str, share: float) -> None:
    quantised = replace(USUAL, base=base)  # type: ignore[arg-type]
    for needs in (rollout_needs, trainer_needs, member_needs):
        network = needs(TABLE, quantised).network
        assert network == pytest.approx(share * TABLE.network_gib, rel=0.02)
    exact = replace(quantised, weights="bf16")
    assert rollout_needs(TABLE, exact).network == TABLE.network_gib


def test_bf16_on_rollout_devices_halves_a_float32_network() -> None:
    float32 = replace(USUAL, item_bytes=4)
    cast = replace(float32, weights="bf16")
    assert rollout_needs(TABLE, float32).network == 2 * TABLE.network_gib
    assert rollout_needs(TABLE, cast).network == TABLE.network_gib


def test_ranks_that_share_the_weights_hold_a_part_and_gather_blocks() -> None:
    """What one rank loads is its own part, so no whole copy is in the sum."""
    fragments = replace(USUAL, fragment=16)
    one, four = (trainer_needs(TABLE, replace(fragments, ranks=ranks)) for ranks in (1, 4))
    assert four.network == TABLE.network_gib / 4
    assert four.trained == one.trained
    assert four.peak - one.peak == pytest.approx(0.75 * TABLE.streamed_gib)
    generates = member_needs(TABLE, replace(fragments, ranks=4))
    assert (generates.text, generates.decoder) == (TABLE.text_gib, TABLE.decoder_gib)
    work = max(4 * TABLE.denoise_gib, DECODING_PEAK * TABLE.decode_gib)
    assert generates.peak == pytest.approx(TABLE.network_gib + TABLE.adapter_gib + work)


@pytest.mark.parametrize(
    ("item_bytes", "ranks", "each"),
    [(2, 1, 2 + 4 + 12 + 8), (2, 8, 4 + 12 + 8), (4, 1, 4 + 12 + 8), (4, 8, 4 + 12 + 8)],
)
def test_all_weights_are_trained_in_float32(item_bytes: int, ranks: int, each: int) -> None:
    """Weights, gradients with their copy and the total of all members, and two moments; on a device
    alone beside weights in bfloat16 that it computes with, which ranks gather instead."""
    weights = TABLE.network_gib / 2  # times bytes
    use = all_weights(item_bytes=item_bytes, ranks=ranks)
    needed = trainer_needs(TABLE, use)
    row = TABLE.row_gib * item_bytes / 2
    gathered = TABLE.streamed_gib * item_bytes / 2 * (1 - 1 / ranks)
    assert needed.total == pytest.approx(each * weights / ranks + row + gathered)


def test_more_sets_of_all_weights_than_memory_are_refused_in_one_line() -> None:
    """SD3.5-M fits an H100 as a fluid device, and does not with the versions before and ahead."""
    profile = load_profile("sd35-medium")
    table = memory_of(profile)
    use = replace(usual(table), rank=0)
    ahead = replace(use, sets=TrainedSets(ahead=2, on_host=1))
    one, three = member_needs(table, use), member_needs(table, ahead)
    assert three.trained - one.trained == pytest.approx(2 * table.network_gib)
    assert three.host == table.network_gib
    assert fits(with_memory(profile, use), "H100", "member") is None
    reason = fits(with_memory(profile, ahead), "H100", "member")
    assert reason is not None and "GiB on a device that generates and trains" in reason


def test_tiles_lower_the_peak_of_decoding_and_nothing_else() -> None:
    table = memory_of(load_profile("hunyuanvideo"))
    whole, tiled = (
        rollout_needs(table, replace(usual(table), tiles=each)) for each in (False, True)
    )
    assert whole.peak == DECODING_PEAK * table.decode_gib
    assert tiled.peak == max(DECODING_PEAK * table.tiled_gib, table.denoise_gib)
    assert whole.held == tiled.held
    small = replace(usual(table), height=64, width=64, frames=5, tiles=True)
    assert (
        rollout_needs(table, small).peak <= rollout_needs(table, replace(small, tiles=False)).peak
    )


def test_a_small_device_generates_if_it_streams() -> None:
    assert fits(with_memory(FLUX, USUAL), "4090", "rollout") is not None
    profile = with_memory(FLUX, USUAL, ["4090"])
    assert fits(profile, "4090", "rollout") is None
    assert fits(profile, "4090", "trainer") is not None
    assert holds_fragments(profile, "4090", "rollout", 16)
    assert fits(profile, "H100", "rollout") is None and not speed(profile, "4090", "trainer")


def test_a_step_takes_at_least_what_its_weights_take_to_come() -> None:
    apart = replace(USUAL, encodes=False)
    profile, steps = with_memory(FLUX, apart, ["4090"]), FLUX.shape.steps
    streaming, link = profile.streaming["4090"], profile.devices["4090"].host_gb_per_second
    waits = streaming.host_gib * GIB_TO_GB / link
    assert waits == pytest.approx(0.952, rel=0.01) and link == 25
    plain = FLUX.devices["4090"].generation_speed

    def alone(samples: int) -> float:
        return steps * FLUX.step_seconds(samples) / plain

    def streamed(samples: int) -> float:
        each = FLUX.rollout.decode_seconds + FLUX.rollout.reward_seconds
        return fragment_seconds(profile, "4090", samples) - samples * each / plain

    assert streamed(1) == pytest.approx(steps * waits) and alone(1) < steps * waits
    assert streamed(16) == pytest.approx(alone(16)), "large fragments hide it"
    assert speed(profile, "4090", "rollout") == pytest.approx(plain)


def test_a_member_that_streams_has_two_blocks_and_waits_for_all_of_them_in_each_pass() -> None:
    streams = replace(USUAL, encodes=False, streams=True, trainer_streams=True)
    resident, streamed = (
        member_needs(TABLE, replace(streams, trainer_streams=each)) for each in (False, True)
    )
    assert streamed.total == pytest.approx(resident.total - TABLE.network_gib + TABLE.streamed_gib)
    assert (resident.host, streamed.host) == (0, TABLE.network_gib)
    profile = with_memory(FLUX, streams)
    assert fits(profile, "4090", "member") is None
    waits = profile.variant.streamed_gb / profile.devices["4090"].host_gb_per_second
    assert waits == pytest.approx(0.952, rel=0.01)
    assert pass_seconds(profile, 1, kind="4090") == pytest.approx(2 * waits)
    assert pass_seconds(profile, 16, kind="4090") == pass_seconds(profile, 16) > 2 * waits
    steps = fragment_seconds(profile, "4090", 1, "member")
    assert (
        FLUX.shape.steps * waits
        < steps
        < fragment_seconds(FLUX, "4090", 1) + (FLUX.shape.steps * waits)
    )


def test_what_is_offloaded_leaves_the_device_and_crosses_twice() -> None:
    figures = {"offload_gib": 0.7 * TABLE.row_gib, "offloaded_row_gib": 0.4 * TABLE.row_gib}
    table = TABLE.model_copy(update=figures)
    kept, offloaded = (replace(USUAL, rows=4, offloads=each) for each in (False, True))
    moved = 4 * table.offload_gib
    before, after = trainer_needs(table, kept), trainer_needs(table, offloaded)
    assert before.peak - after.peak == pytest.approx(4 * 0.6 * table.row_gib)
    assert before.host == 0 and after.host == pytest.approx(moved)
    profile = with_memory(FLUX.model_copy(update={"memory": table}), offloaded)
    assert profile.variant.row_gib == pytest.approx(0.4 * table.row_gib)
    slow = profile.devices["H100"].model_copy(update={"host_gb_per_second": 0.001})
    profile = profile.model_copy(update={"devices": {"H100": slow}})
    crosses = 2 * moved * GIB_TO_GB / 0.001
    assert pass_seconds(profile, 4, kind="H100") == pytest.approx(crosses)


def test_a_slow_link_slows_a_device_in_every_fragment() -> None:
    slow = FLUX.devices["4090"].model_copy(update={"host_gb_per_second": 2.0})
    profile = FLUX.model_copy(update={"devices": {**FLUX.devices, "4090": slow}})
    streaming = with_memory(profile, USUAL, ["4090"])
    assert speed(streaming, "4090", "rollout") < 0.6 * slow.generation_speed


def test_an_estimate_fills_a_device_only_so_far() -> None:
    profile = with_memory(FLUX, USUAL)
    needed = profile.rollout.memory_gib
    for has, fit in ((needed / MEMORY_SHARE * 1.001, True), (needed * 1.01, False)):
        card = FLUX.devices["L40S"].model_copy(update={"memory_gib": has})
        sized = profile.model_copy(update={"devices": {"L40S": card}})
        reason = fits(sized, "L40S", "rollout")
        assert (reason is None) == fit
        assert fit or (reason or "").endswith("GiB, of which 92% count")
