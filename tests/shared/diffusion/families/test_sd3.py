"""The SD3 adapter on the demo's model, against diffusers' own pipeline."""

from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from shared.diffusion.models import ModelAdapter, load_model, repeat_rows
from shared.diffusion.sampler import Denoising, SamplingPlan, denoise
from shared.errors import UserError
from shared.models.sigmas import linear_sigmas
from tests.paths import ROOT

DIGITS = ROOT / "models" / "digits"
CPU = torch.device("cpu")
SEEDS = [3, 4, 5]


@pytest.fixture(scope="module")
def model() -> ModelAdapter:
    parts = {"transformer", "text", "decoder"}
    return load_model(DIGITS, parts, device=CPU, dtype=torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_without_noise_the_sampler_is_the_pipeline(model: ModelAdapter, guidance: float) -> None:
    sigmas = linear_sigmas(10)
    denoising = Denoising(
        SamplingPlan(sigmas=sigmas, window=range(0)),
        seeds=SEEDS,
        shape=model.latent_shape(height=8, width=8),
        device=CPU,
    )
    start = denoising.latents
    conditions = repeat_rows(model.encode("a handwritten five", guidance=guidance), len(SEEDS))
    ours = denoise(
        lambda latents, sigma: model.velocity(latents, sigma, conditions, guidance=guidance),
        denoising,
    )

    pipeline = StableDiffusion3Pipeline.from_pretrained(DIGITS, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    theirs = pipeline(
        "a handwritten five",
        num_images_per_prompt=len(SEEDS),
        height=8,
        width=8,
        num_inference_steps=10,
        sigmas=list(sigmas[:-1]),
        guidance_scale=guidance,
        latents=start.clone(),
        output_type="latent",
        max_sequence_length=pipeline.tokenizer_3.model_max_length,
    ).images
    assert float((ours - theirs).abs().max()) <= 1e-5

    images = pipeline.image_processor.postprocess(
        pipeline.vae.decode(
            theirs / pipeline.vae.config.scaling_factor + pipeline.vae.config.shift_factor
        )[0].detach(),
        output_type="pt",
    )
    torch.testing.assert_close(model.decode(ours), images, rtol=0, atol=1e-5)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_row_does_not_depend_on_its_batch(
    model: ModelAdapter, guidance: float, rows: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(4, 1, 8, 8, generator=generator)
    sigma = torch.tensor([0.9, 0.5, 0.3, 0.1])
    conditions = model.encode("a handwritten two", guidance=guidance)
    whole = model.velocity(latents, sigma, repeat_rows(conditions, 4), guidance=guidance)
    part = model.velocity(
        latents[:rows], sigma[:rows], repeat_rows(conditions, rows), guidance=guidance
    )
    torch.testing.assert_close(part, whole[:rows], rtol=0, atol=1e-5)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a diffusers model"):
        load_model(tmp_path, {"transformer"}, device=CPU, dtype=torch.float32)
    (tmp_path / "model_index.json").write_text('{"_class_name": "KandinskyPipeline"}')
    with pytest.raises(UserError, match=r"supported are: .*StableDiffusion3Pipeline"):
        load_model(tmp_path, {"transformer"}, device=CPU, dtype=torch.float32)
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    with pytest.raises(UserError, match="cannot load"):
        load_model(tmp_path, {"transformer"}, device=CPU, dtype=torch.float32)


def test_without_its_decoder_a_model_does_not_guess_its_latent_shape() -> None:
    trainer = load_model(DIGITS, {"transformer"}, device=CPU, dtype=torch.float32)
    with pytest.raises(ValueError, match="decoder"):
        trainer.latent_shape(height=8, width=8)
