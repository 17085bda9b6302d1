"""The negative prompt of a recipe, of a prompt and of a model's authors is the pipeline's own."""

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.evaluation.sampler import Sampler
from digenrl.local.checking.inputs import check_inputs
from digenrl.report.pipeline_code import usage
from services.rollout.encoder_engine import EncoderEngine
from shared.diffusion.generation import Generator
from shared.diffusion.loading.models import repeat_rows
from shared.diffusion.policy import load_policy
from shared.diffusion.sampling.encoding import encoded
from shared.diffusion.sampling.sampler import Denoising, SamplingPlan, denoise
from shared.diffusion.sampling.tensors import unpack
from shared.errors import UserError
from shared.models.families import FAMILIES as SPECS
from shared.recipe.networks import check_networks
from shared.recipe.recipe import Recipe, load_recipe, override
from tests import examples, tiny_models
from tests.paths import DIGITS

CPU = torch.device("cpu")
SIZE, STEPS, GUIDANCE, SEEDS = 32, 3, 4.0, [5, 9]
KEY, OWN = "blurry, overexposed", "watermark"
GUIDED = sorted(
    {"sd3", "qwen-image", "qwen-image-edit", "wan", "wan-i2v", "flux2-klein", "z-image",
     "hunyuan-video15", "ltx2"}
    & {*tiny_models.FAMILIES, *tiny_models.OTHERS}
)  # fmt: skip
QUICK = "sd3", "qwen-image", "wan", "z-image"
DISTILLED = [name for name in ("flux", "hunyuan-video", "flux2") if name in tiny_models.FAMILIES]


def recipe_of(family: str, folder: Path, **model: Any) -> Recipe:
    frames = 5 if family in tiny_models.VIDEO else 1
    table = {
        "folder": folder, "height": SIZE, "width": SIZE, "frames": frames, "guidance": GUIDANCE,
        "lora": {}, **model,
    }  # fmt: skip
    return override(load_recipe(DIGITS), {f"model.{key}": value for key, value in table.items()})


def source_of(family: str) -> bytes | None:
    if family not in tiny_models.EDITS:
        return None
    out = io.BytesIO()
    tiny_models.picture(SIZE, SIZE).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in GUIDED],
)
def test_samples_are_the_pipeline_s_with_that_negative_prompt(family: str, tmp_path: Path) -> None:
    """That of a prompt goes before the recipe's, and that before its authors'."""
    folder, pipeline = tiny_models.save(family, tmp_path / family), tiny_models.build(family)
    model = tiny_models.load(folder)
    frames = 5 if family in tiny_models.VIDEO else 1
    shape = model.latent_shape(height=SIZE, width=SIZE, frames=frames)
    plain, keyed = recipe_of(family, folder), recipe_of(family, folder, negative_prompt=KEY)
    authors = SPECS[type(pipeline).__name__].negative_prompt
    found = []
    for recipe, own, wanted in ((plain, None, authors), (keyed, None, KEY), (keyed, OWN, OWN)):
        rows = encoded(model, recipe, tiny_models.PROMPT, source_of(family), own)
        conditions = repeat_rows(rows, len(SEEDS))
        begin = SamplingPlan(sigmas=(1.0, 0.0), window=range(0))
        start = Denoising(begin, seeds=SEEDS, shape=shape, device=CPU).latents
        theirs = tiny_models.run(
            family, pipeline, start, guidance=GUIDANCE, output="latent", height=SIZE, width=SIZE,
            frames=frames, steps=STEPS, negative=wanted,
        )  # fmt: skip
        sigmas = tuple(pipeline.scheduler.sigmas.tolist())
        plan = SamplingPlan(sigmas=sigmas, window=range(0))

        def velocity(latents: Tensor, sigma: Tensor, rows: Any = conditions) -> Tensor:
            return model.velocity(latents, sigma, rows, guidance=GUIDANCE)

        with torch.no_grad():
            ours = denoise(velocity, Denoising(plan, seeds=SEEDS, shape=shape, device=CPU))
        largest = max(1.0, float(theirs.abs().max()))
        assert float((ours - theirs).abs().max()) <= 2e-6 * largest, (family, wanted)
        found.append(ours)
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_the_defaults_are_those_that_the_authors_publish() -> None:
    found = {name: spec.negative_prompt for name, spec in SPECS.items() if spec.negative_prompt}
    assert found.keys() == {
        "WanPipeline", "WanImageToVideoPipeline", "QwenImagePipeline", "QwenImageEditPipeline",
    }  # fmt: skip
    assert (
        found["WanPipeline"].startswith("色调艳丽，过曝，静态") and len(found["WanPipeline"]) > 100
    )
    assert found["QwenImagePipeline"] == " "


def test_rollout_encoders_and_evaluations_use_one_negative_prompt(tmp_path: Path) -> None:
    """Training reads what rollout stores."""
    folder = tiny_models.save("sd3", tmp_path / "sd3")
    recipe = recipe_of("sd3", folder, negative_prompt=KEY)
    prompt = examples.task().prompt.model_copy(update={"negative_prompt": OWN})
    generator = Generator(recipe, load_policy(recipe, {"transformer", "text", "decoder"}))
    begun = generator.begin(examples.task(prompt=prompt))
    ahead = unpack(asyncio.run(EncoderEngine(recipe).conditions(prompt.text, None, OWN)))
    for name, tensor in ahead.items():
        assert torch.equal(begun.conditions[name][:1], tensor), name
    other = unpack(asyncio.run(EncoderEngine(recipe).conditions(prompt.text)))
    assert not torch.equal(other["negative_text"], ahead["negative_text"])
    sampler = Sampler(recipe)
    made = [
        sampler.sample([prompt.text], num_each=1, seed=0, negatives=[own]) for own in (OWN, None)
    ]
    assert (made[0] != made[1]).any()


def test_two_prompts_that_differ_in_it_are_encoded_apart() -> None:
    digest = examples.ENCODING.digest
    assert len({digest("a"), digest("a", None, ""), digest("a", None, OWN)}) == 3


@pytest.mark.parametrize("family", DISTILLED)
def test_without_an_unconditional_half_it_is_refused(family: str, tmp_path: Path) -> None:
    folder = tiny_models.save(family, tmp_path / family)
    with pytest.raises(UserError, match=r"^model\.negative_prompt: .* input of its network; leave"):
        check_networks(recipe_of(family, folder, negative_prompt=KEY))
    check_networks(recipe_of(family, folder))


def test_a_column_that_has_no_effect_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a three", "digit": 3, "negative_prompt": "blurry"}\n')
    recipe = load_recipe(DIGITS, {"data.prompts": str(path)})
    with pytest.raises(UserError, match=r"column negative_prompt, and model\.guidance 1 is no"):
        check_inputs(recipe)
    check_inputs(override(recipe, {"model.guidance": 2.0}))
    with pytest.raises(UserError, match=r"model\.negative_prompt: model\.guidance 1 is no"):
        check_networks(override(load_recipe(DIGITS), {"model.negative_prompt": KEY}))


def test_the_card_s_code_has_it(tmp_path: Path) -> None:
    folder = tiny_models.save("sd3", tmp_path / "sd3")
    recipe = recipe_of("sd3", folder, negative_prompt=KEY)
    assert f'negative_prompt="{KEY}"' in usage(recipe, "a")
    assert f'negative_prompt="{OWN}"' in usage(recipe, "a", OWN)
    assert "negative_prompt" not in usage(recipe_of("sd3", folder), "a")
