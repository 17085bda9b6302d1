"""Families that only the slow tests go through: each is its pipeline, once, in the quick ones."""

from pathlib import Path

import pytest
import torch

from shared.diffusion.loading.models import load_model, repeat_rows
from shared.diffusion.sampling.sampler import Denoising, SamplingPlan, denoise
from tests import tiny_models

GUIDANCE, SIZE, FRAMES, STEPS = 4.0, 32, 5, 2
QUOTING = 'a sign that says "ab" and "c"'
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("family", "prompt"),
    [
        ("z-image", tiny_models.PROMPT),
        ("flux2", tiny_models.PROMPT),
        ("hunyuan-video15", QUOTING),
        ("ltx2", tiny_models.PROMPT),
    ],
)
def test_without_noise_the_sampler_is_the_pipeline(
    family: str, prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_models, "PROMPT", prompt)
    pipeline = tiny_models.build(family)
    pipeline.save_pretrained(tmp_path)
    parts = {"transformer", "text", "decoder"}
    model = load_model(tmp_path, parts, device=CPU, dtype=torch.float32)  # type: ignore[arg-type]
    frames = FRAMES if family in tiny_models.VIDEO else 1
    shape = model.latent_shape(height=SIZE, width=SIZE, frames=frames)

    def drawn(*sigmas: float) -> Denoising:
        plan = SamplingPlan(sigmas=sigmas, window=range(0))
        return Denoising(plan, seeds=[3, 4], shape=shape, device=CPU)

    theirs = tiny_models.run(
        family, pipeline, drawn(1.0, 0.0).latents, guidance=GUIDANCE, output="latent",
        height=SIZE, width=SIZE, frames=frames, steps=STEPS,
    )  # fmt: skip
    conditions = repeat_rows(model.encode(prompt, guidance=GUIDANCE), 2)
    with torch.no_grad():
        ours = denoise(
            lambda latents, sigma: model.velocity(latents, sigma, conditions, guidance=GUIDANCE),
            drawn(*pipeline.scheduler.sigmas.tolist()),
        )
    assert float((ours - theirs).abs().max()) <= 2e-6
