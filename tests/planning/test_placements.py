"""Devices that are too small for a model as it is take part, with what they need."""

from dataclasses import replace

import pytest

from digenrl.planning.placements import ModelPlacement, PlacementAdvice, advise, placements
from digenrl.planning.remedies import keys, memory_remedy
from digenrl.trace.memory import ModelUse, usual
from services.scheduler.costs.profile import Profile, load_profile
from services.scheduler.costs.seconds import speed
from services.scheduler.costs.split import Split
from shared.errors import UserError
from shared.recipe.schedule import RunSchedule

STRICT = RunSchedule(tag="auto")
QUICK = 0.1
FLUX, QWEN, HUNYUAN = map(load_profile, ("flux1-dev", "qwen-image", "hunyuanvideo"))
ENCODER = {"encoder.workers": 1}


def use_of(profile: Profile, **changes: object) -> ModelUse:
    assert profile.memory is not None
    return replace(usual(profile.memory), **changes)  # type: ignore[arg-type]


def found_placements(profile: Profile, *kinds: str, **changes: object) -> list[ModelPlacement]:
    return list(placements(profile, use_of(profile, **changes), dict.fromkeys(kinds, 2)))


def advised(profile: Profile, devices: dict[str, int]) -> PlacementAdvice:
    return advise(profile, use_of(profile), devices, STRICT, effort=QUICK)


def test_large_devices_are_planned_as_they_are() -> None:
    for profile in (FLUX, QWEN, HUNYUAN):
        placement, *with_more_rows = found_placements(profile, "H100", "A100")
        assert placement.keys == {} and not placement.profile.streaming
        assert all(each.keys == ENCODER for each in with_more_rows)


def test_devices_stream_before_their_weights_are_quantised() -> None:
    plain, streamed, quantised = found_placements(FLUX, "H100", "4090")
    assert not speed(plain.profile, "4090", "rollout") and plain.keys == {}
    assert streamed.keys == ENCODER and list(streamed.profile.streaming) == ["4090"]
    assert quantised.keys == {**ENCODER, "rollout.weights": "int8"}
    assert not quantised.profile.streaming and speed(quantised.profile, "4090", "rollout")


def test_a_remedy_that_lets_no_more_devices_take_part_is_left_out() -> None:
    plain, more_rows, tiled = found_placements(HUNYUAN, "H100", "L40S")
    assert (plain.keys, more_rows.keys) == ({}, ENCODER)
    assert tiled.keys == {**ENCODER, "model.vae_tiling": True}
    assert not tiled.profile.streaming


def test_what_a_recipe_has_already_is_not_advised() -> None:
    (placement,) = found_placements(FLUX, "H100", "4090", streams=True, encodes=False)
    assert placement.keys == {} and set(placement.profile.streaming) == set(FLUX.devices)
    split = Split({"4090": 2}, {"H100": 2})
    assert placement.recipe_keys(split, STRICT) == {} and placement.environment(split) == {}


def test_weights_are_quantised_only_where_an_algorithm_can_weigh_them() -> None:
    plain, streamed = found_placements(FLUX, "H100", "4090", has_importance_weights=False)
    assert plain.keys == {} and streamed.keys == ENCODER


def test_stale_samples_of_quantised_weights_need_a_clip_of_their_own() -> None:
    quantised = found_placements(FLUX, "H100", "4090")[2]
    split = Split({"4090": 2}, {"H100": 2})
    keys = quantised.recipe_keys(split, STRICT.changed(max_staleness=1))
    assert keys["algorithm.stale_loss"] == "decoupled"
    assert "algorithm.stale_loss" not in quantised.recipe_keys(split, STRICT)


def test_a_recipe_says_streamed_if_all_that_generate_stream_and_else_their_workers_do() -> None:
    streamed = found_placements(FLUX, "H100", "4090")[1]
    alone, mixed = Split({"4090": 4}, {"H100": 2}), Split({"4090": 4, "H100": 1}, {"H100": 1})
    assert streamed.recipe_keys(alone, STRICT) == {**ENCODER, "rollout.memory": "streamed"}
    assert streamed.environment(alone) == {}
    assert streamed.recipe_keys(mixed, STRICT) == ENCODER
    assert streamed.environment(mixed) == {"4090": {"DIGENRL_ROLLOUT_MEMORY": "streamed"}}


def test_cards_of_24_gb_generate_with_flux_and_the_plan_says_why() -> None:
    advice = advised(FLUX, {"H100": 2, "4090": 4})
    best = advice.planned.best
    assert best.split == Split({"4090": 4}, {"H100": 2})
    assert not advice.left_out and not advice.planned.excluded
    encoder, held, plain, quantised = advice.reasons
    assert "encodes prompts" in encoder and encoder.endswith("9.1 GiB (text encoders 9.1)")
    assert held.startswith("4090 generates with 4.3 GiB (network 1.4 + decoder 0.3")
    assert "which hides the 0.95 s in which its weights come at 25 GB/s" in held
    assert plain.startswith("as it is: ") and plain.endswith("s per step, slower")
    assert 'rollout.weights = "int8": ' in quantised and quantised.endswith("no faster")
    assert not any("\n" in line for line in advice.reasons)


@pytest.mark.slow
def test_weights_are_quantised_where_streaming_would_take_longer() -> None:
    slow = FLUX.devices["4090"].model_copy(update={"host_gb_per_second": 3.0})
    profile = FLUX.model_copy(update={"devices": {**FLUX.devices, "4090": slow}})
    advice = advised(profile, {"H100": 2, "4090": 4})
    assert advice.placement.keys == {**ENCODER, "rollout.weights": "int8"}
    assert any('rollout.memory = "streamed"' in line for line in advice.reasons)


@pytest.mark.slow
def test_a_device_that_gains_nothing_is_left_out_with_what_would_let_it_take_part() -> None:
    advice = advised(FLUX, {"H100": 12, "4090": 1})
    assert advice.placement.keys == {}
    (line,) = advice.left_out
    assert line.startswith("flux1-dev needs 34.14 GiB on a rollout device; 4090 has 23 GiB; ")
    assert line.endswith('with encoder.workers = 1, rollout.memory = "streamed"')


def test_devices_that_no_remedy_lets_train_are_refused_in_one_line() -> None:
    with pytest.raises(UserError) as refused:
        advised(QWEN, {"4090": 8})
    line = str(refused.value)
    assert "no split of 8 4090 can both generate and train" in line and "\n" not in line
    assert "to generate on 4090, it would take 7.65 GiB with encoder.workers = 1, " in line
    assert "to train on 4090, it would take " in line
    assert line.endswith("with trainer.devices = 8, trainer.shard_devices = 8")


def test_a_profile_without_a_table_of_memory_is_planned_by_its_figures() -> None:
    plain = FLUX.model_copy(update={"memory": None})
    advice = advise(plain, None, {"H100": 2, "4090": 2}, STRICT, effort=QUICK)
    assert advice.placement.keys == {}
    assert advice.left_out == ("flux1-dev needs 24.5 GiB on a rollout device; 4090 has 23 GiB",)
    assert memory_remedy(plain, use_of(FLUX), "4090", "rollout") == ""


def test_what_no_key_makes_fit_is_said() -> None:
    tiny = FLUX.devices["4090"].model_copy(update={"memory_gib": 2.0})
    profile = FLUX.model_copy(update={"devices": {"4090": tiny}})
    said = memory_remedy(profile, use_of(FLUX), "4090", "rollout")
    assert said == "no key makes it fit; the minimum is 4.26 GiB"


def test_smaller_fragments_are_tried_before_anything_that_costs() -> None:
    assert HUNYUAN.memory is not None
    use = use_of(HUNYUAN, fragment=24, encodes=False, tiles=True)
    said = memory_remedy(HUNYUAN, use, "L40S", "rollout")
    assert said.endswith("with schedule.fragment_size = 1")
    assert keys(use, replace(use, fragment=1)) == {"schedule.fragment_size": 1}


def test_a_lent_trainer_gives_up_the_text_encoders_before_it_is_no_longer_lent() -> None:
    tiles = memory_remedy(HUNYUAN, use_of(HUNYUAN), "L40S", "member")
    assert tiles.endswith("with encoder.workers = 1, model.vae_tiling = true")
    card = QWEN.devices["L40S"].model_copy(update={"memory_gib": 54.4})
    profile = QWEN.model_copy(update={"devices": {"L40S": card}})
    only_trains = 'with schedule.mode = "disaggregated", schedule.tag = "off"'
    assert memory_remedy(profile, use_of(QWEN), "L40S", "member").endswith(only_trains)
