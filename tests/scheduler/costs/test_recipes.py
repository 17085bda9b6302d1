import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from digenrl.planning.recipes import with_staleness
from services.scheduler.costs.profile import load_profile
from services.scheduler.costs.recipes import fit_to_recipe, num_forward_only_passes, profile_for
from services.scheduler.costs.seconds import training_work
from shared.errors import UserError
from shared.models.published import PUBLISHED
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.recipe.schedule import RunSchedule
from tests.paths import DIGITS


def _recipe(**changes: Any) -> Recipe:
    plain = {
        "batch.groups": 24, "batch.group_size": 12, "sampling.steps": 14, "sampling.window": 5,
        "sampling.first_window_starts": (0, 2), "trainer.micro_batch": "auto",
        "schedule.fragment_size": "auto", "schedule.tag": "auto", "schedule.tsp_steps": "auto",
        "schedule.mode": "disaggregated", "trainer.deterministic": False,
        "schedule.max_staleness": 0,
    }  # fmt: skip
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return override(load_recipe(DIGITS), {**plain, **dotted})


def test_the_recipe_gives_the_batch_and_the_profile_the_costs() -> None:
    profile = load_profile("qwen-image")
    shaped = fit_to_recipe(profile, _recipe(model__guidance=3.5))
    shape = shaped.shape
    assert (shape.groups, shape.group_size, shape.steps) == (24, 12, 14)
    assert (shape.trained_steps, shape.updates) == (5, 1)
    assert shaped.variant.forwards_per_step == 2
    assert fit_to_recipe(profile, _recipe(model__guidance=1.0)).variant.forwards_per_step == 1
    told = fit_to_recipe(load_profile("flux1-dev"), _recipe(model__guidance=3.5))
    assert told.variant.forwards_per_step == 1, "FLUX.1 is told the guidance"
    assert training_work(shaped) > shaped.shape.samples * 5 * 3 * 2 * shaped.rollout.sample_seconds


def test_seconds_are_those_of_the_recipe_s_size() -> None:
    """FLUX.1's profile is of 720 px and 512 tokens of text."""
    profile = load_profile("flux1-dev")
    size = {"model__height": 720, "model__width": 720, "model__text_tokens": 512}
    assert fit_to_recipe(profile, _recipe(**size)).rollout == profile.rollout
    small = fit_to_recipe(profile, _recipe(**size | {"model__height": 512, "model__width": 512}))
    assert small.rollout.call_seconds == profile.rollout.call_seconds
    assert small.rollout.sample_seconds / profile.rollout.sample_seconds == pytest.approx(
        21.5 / 37.3, rel=0.01
    )
    assert small.rollout.decode_seconds == pytest.approx(
        profile.rollout.decode_seconds * (512 / 720) ** 2
    )
    short = fit_to_recipe(profile, _recipe(**size | {"model__text_tokens": 128}))
    assert short.rollout.sample_seconds < profile.rollout.sample_seconds


def test_trained_rows_take_the_passes_that_the_recipe_asks_for() -> None:
    profile = load_profile("wan2.1-14b")

    def rho(**changes: object) -> float:
        size = {"model__height": 240, "model__width": 416, "model__frames": 33}
        return fit_to_recipe(profile, _recipe(**size | changes)).variant.rho

    checkpointed = {"trainer__gradient_checkpointing": True}
    assert rho(**checkpointed, algorithm__kl_beta=0.004) == pytest.approx(4.15, rel=0.02)
    assert rho(**checkpointed, algorithm__kl_beta=0.0) == pytest.approx(3.15, rel=0.02)
    assert rho(algorithm__kl_beta=0.0) == pytest.approx(2.15, rel=0.02)
    half: dict[str, object] = {"algorithm__cfg_gradient": "conditional", "model__guidance": 5.0}
    assert rho(**half, algorithm__kl_beta=0.0) == pytest.approx(1 + 1.15 / 2, rel=0.02)
    assert rho(**checkpointed, **half, algorithm__kl_beta=0.0) == pytest.approx(
        1 + 2.15 / 2, rel=0.02
    )
    selective = {"trainer__gradient_checkpointing": "selective", "algorithm__kl_beta": 0.0}
    assert 2.15 < rho(**selective) < 3.15


def test_an_old_policy_is_one_more_pass_of_every_row() -> None:
    profile = load_profile("wan2.1-14b")
    nft = {"algorithm__name": "diffusion-nft", "sampling__first_window_starts": (0, 0)}
    old, none = (_recipe(**nft, algorithm__nft_decay=decay) for decay in (1, 0))
    assert (num_forward_only_passes(old), num_forward_only_passes(none)) == (2, 1), (
        "and one of the base model"
    )
    seconds = [fit_to_recipe(profile, each).variant.rho for each in (old, none)]
    assert seconds[0] - seconds[1] == pytest.approx(1)


def test_a_profile_that_counts_no_operations_keeps_its_seconds() -> None:
    plain = load_profile("flux1-dev").model_copy(update={"work": None})
    found = fit_to_recipe(plain, _recipe())
    assert found.rollout == plain.rollout and found.variant.rho == plain.variant.rho


def test_what_is_open_is_for_the_planner() -> None:
    assert _recipe().run_schedule == RunSchedule(tag="auto")


def test_what_is_fixed_is_kept() -> None:
    found = _recipe(
            schedule__fragment_size=4, schedule__tag=3, schedule__max_staleness="auto",
            schedule__tsp_steps=1,
        ).run_schedule  # fmt: skip
    assert found == RunSchedule(fragment_size=4, tag=3, max_staleness=1, tsp_steps=1)
    assert _recipe(schedule__tag="off").run_schedule.tag == 0
    sequential = _recipe(schedule__mode="sequential", schedule__max_staleness=1).run_schedule
    assert (sequential.mode, sequential.tag, sequential.max_staleness) == ("sequential", 0, 0)


def test_colocated_is_one_more_schedule() -> None:
    found = _recipe(
        schedule__mode="colocated", rollout__workers=0, schedule__max_staleness=1
    ).run_schedule
    assert (found.mode, found.max_staleness) == ("colocated", 0)
    with pytest.raises(UserError, match="the mode here is colocated"):
        with_staleness(found, 1)


def test_groups_in_order_are_generated_whole() -> None:
    found = _recipe(trainer__deterministic=True).run_schedule
    assert found.deterministic and found.fragment_size == 12


def test_the_option_takes_the_recipes_place() -> None:
    open_ = _recipe().run_schedule
    assert with_staleness(open_, None) == open_
    assert with_staleness(open_, 1).max_staleness == 1
    with pytest.raises(UserError, match="--staleness: 1 needs"):
        with_staleness(RunSchedule(mode="sequential"), 1)


IDS = {
    "stabilityai/stable-diffusion-3.5-medium": "sd35-medium",
    "stabilityai/stable-diffusion-3.5-large": "sd35-large",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "wan2.1-1.3b",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": "wan2.1-14b",
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": "wan2.1-i2v-14b",
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": "wan2.1-i2v-14b",
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": "wan2.2-a14b",
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": "wan2.2-a14b",
    "black-forest-labs/FLUX.1-dev": "flux1-dev",
    "black-forest-labs/FLUX.1-schnell": "flux1-dev",
    "black-forest-labs/FLUX.1-Kontext-dev": "flux1-kontext",
    "black-forest-labs/FLUX.2-dev": "flux2-dev",
    "black-forest-labs/FLUX.2-klein-4B": "flux2-klein-base-4b",
    "black-forest-labs/FLUX.2-klein-base-4B": "flux2-klein-base-4b",
    "Qwen/Qwen-Image": "qwen-image",
    "Qwen/Qwen-Image-Edit": "qwen-image-edit",
    "Tongyi-MAI/Z-Image": "z-image",
    "Tongyi-MAI/Z-Image-Turbo": "z-image",
    "hunyuanvideo-community/HunyuanVideo": "hunyuanvideo",
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": "hunyuanvideo-1.5",
    "Lightricks/LTX-2": "ltx-2",
}


@pytest.mark.parametrize("name", IDS)
def test_a_model_that_is_not_fetched_has_the_profile_of_the_network_published_under_its_id(
    name: str,
) -> None:
    recipe = _recipe(model__id=name, model__folder=Path("nowhere") / name)
    assert profile_for(recipe) == IDS[name]


@pytest.mark.parametrize("name", sorted(each.name for each in PUBLISHED.iterdir()))
def test_a_profile_is_found_by_the_network_as_diffusers_saves_it_whatever_the_folder_s_name(
    name: str, tmp_path: Path
) -> None:
    """What `save_pretrained` writes has every key of the class, also those left out on the hub."""
    import diffusers

    folder = tmp_path / "my-finetune"
    shutil.copytree(PUBLISHED / name, folder)
    file = folder / "transformer" / "config.json"
    plain = json.loads(file.read_text())
    with_defaults = getattr(diffusers, plain["_class_name"]).extract_init_dict(plain)[0]
    file.write_text(json.dumps({**with_defaults, "_class_name": plain["_class_name"]}))
    wanted = "wan2.2-a14b" if name == "wan2.2-i2v-a14b" else name
    assert profile_for(_recipe(model__folder=folder)) == wanted
    file.write_text(json.dumps({**plain, "num_layers": 3, "n_layers": 3}))
    renamed = folder.rename(tmp_path / name)
    with pytest.raises(UserError, match="no cost profile fits the network"):
        profile_for(_recipe(model__folder=renamed))


def test_a_model_without_a_profile_needs_the_option() -> None:
    with pytest.raises(UserError, match="--profile: no cost profile fits the network of"):
        profile_for(_recipe())
