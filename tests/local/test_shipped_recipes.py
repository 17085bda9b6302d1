"""What the recipes of published models say of themselves is so."""

import json
from itertools import product

import pytest

from bench.devices import parse_devices
from digenrl.local.checking.check import check
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import Profile, load_profile
from services.scheduler.costs.recipes import fit_to_recipe, profile_for
from shared.recipe.recipe import Recipe, load_recipe
from tests.local.test_check import CARDS
from tests.paths import RECIPES

MODELS = ("sd35-medium", "flux1-dev", "qwen-image", "wan2.1-14b", "hunyuanvideo")
IN_ONE_SIZE = ("sd35-large", "wan2.1-1.3b", "wan2.2-a14b")
DEVICES = {"": "h100=8", ".1-gpu": "h100=1", ".mixed": "h100=8,a100=16"}
ON_32 = ("flux1-dev", "wan2.1-14b", "hunyuanvideo")
OCR_SECONDS = 0.2
"""CPU time that RapidOCR takes for an image of 512 x 512 pixels."""
OCR_FRAME_SECONDS = 0.3
"""The same of a video's frame of 240 x 416, which it enlarges."""
BUSY = 0.6
"""Largest share of a reward worker's time; groups come in bursts."""


def recipe_of(name: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.toml")


def costs_of(recipe: Recipe) -> Profile:
    return fit_to_recipe(load_profile(profile_for(recipe)), recipe)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        *product(MODELS, DEVICES),
        *((model, "") for model in IN_ONE_SIZE),
        *((model, ".32-gpu") for model in ON_32),
    ],
)
def test_reward_workers_keep_up_with_the_fastest_step_there_can_be(model: str, size: str) -> None:
    recipe = recipe_of(f"{model}{size}")
    if not any(scorer.type == "ocr" for scorer in recipe.reward.scorers):
        return
    frames = recipe.model.frames
    each = frames * OCR_FRAME_SECONDS if frames > 1 else OCR_SECONDS
    costs = costs_of(recipe)
    step = floor_seconds(costs, parse_devices("--devices", DEVICES.get(size, "h100=32"), costs))
    work = recipe.batch.groups * recipe.batch.group_size * each
    assert work / recipe.reward.workers <= BUSY * step


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=() if model == "wan2.1-14b" else pytest.mark.slow)
        for model in (*MODELS, *IN_ONE_SIZE)
    ],
)
def test_no_plan_for_eight_gpus_is_much_faster(model: str) -> None:
    found = check(RECIPES / f"{model}.toml", "h100=8", elsewhere=True).forecast
    assert found is not None and found.simulated is not None and found.better is None


@pytest.mark.parametrize("model", MODELS)
def test_a_header_says_what_is_published_and_what_is_not(model: str) -> None:
    text = (RECIPES / f"{model}.toml").read_text()
    header = text.split("\n[run]")[0].replace("\n#", "")
    assert " Equal to " in header and "Differs from the published recipe in: " in header
    recipe = recipe_of(model)
    assert recipe.evaluation.steps is not None and 28 <= recipe.evaluation.steps <= 50
    for said in (recipe.sampling.steps, recipe.sampling.noise_level, recipe.batch.group_size):
        assert str(said) in header
    lora = recipe.model.lora
    assert f"{lora.rank}/{lora.alpha:g}" in header


@pytest.mark.parametrize("model", MODELS)
def test_a_mixed_recipe_says_which_cards_hold_it(model: str) -> None:
    header = (RECIPES / f"{model}.mixed.toml").read_text().split("\nbase =")[0]
    assert "GPUs of 48 GB" in header


@pytest.mark.parametrize("name", CARDS)
def test_a_recipe_for_small_cards_says_how_it_is_started_and_what_its_host_needs(name: str) -> None:
    path = RECIPES / f"{name}.toml"
    header = path.read_text().split("\nbase =")[0]
    assert f"digenrl up recipes/{name}.toml" in header
    assert recipe_of(name).encoder.device == "cpu"
    found = check(path, CARDS[name], elsewhere=True, timing=False).forecast
    assert found is not None
    member, encoder = found.needed["fluid"], found.needed["encode"]
    said = [round(encoder.text), *([round(member.host)] if member.host else [])]
    assert all(f" {gib} " in header for gib in said)


def test_flux_has_the_published_window_text_and_layers() -> None:
    recipe = recipe_of("flux1-dev")
    assert recipe.model.text_tokens == 128
    windows = recipe.sampling.moving_window
    assert {windows.start(0, batch, group=1) for batch in range(50)} == {0}
    assert len(recipe.model.lora.targets) == 12


def test_check_tells_what_the_algorithm_s_name_implies_and_what_the_recipe_sets() -> None:
    checked = check(RECIPES / "hunyuanvideo.toml", elsewhere=True)
    told = [line for line in checked.lines if "dance-grpo implies" in line]
    assert told == [
        'dance-grpo implies sampling.variant = "dance"',
        'dance-grpo implies sampling.windows = "group"',
        "sampling.noise_level = 0.25 in place of 0.3, which dance-grpo implies",
        "dance-grpo implies algorithm.clip_range = 0.0001",
        "sampling.shared_noise = false in place of true, which dance-grpo implies",
        'sampling.stochastic = "trained" in place of "all", which dance-grpo implies',
        'sampling.trained = "window" in place of "random", which dance-grpo implies',
        "dance-grpo implies algorithm.kl_beta = 0.0",
    ]
    found = {each["key"]: each for each in json.loads(checked.as_json)["implied"]}
    assert found["sampling.noise_level"]["value"] == 0.25
