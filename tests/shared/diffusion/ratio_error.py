"""How far from 1 the ratio of a replay is before anything is trained: all families, batch sizes.

    python -m tests.shared.diffusion.ratio_error

prints the largest of each, in float32 and in bfloat16.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from shared.diffusion.models import Conditions, ModelAdapter, load_model, repeat_rows
from shared.diffusion.policy import LoraSpec, attach_lora
from shared.diffusion.sampler import Denoising, SamplingPlan, denoise
from shared.diffusion.transition import transition
from shared.diffusion.weights import trained_parameters
from tests import tiny_models

Trained = Literal["lora", "full"]
ROWS = (1, 2, 3, 4)
GUIDANCES = {
    "sd3": (1.0, 4.0), "flux": (3.5,), "qwen-image": (1.0, 4.0), "wan": (1.0, 4.0),
    "hunyuan-video": (3.5,), "sd3-large": (1.0, 4.0), "wan-small": (1.0, 4.0),
    "wan22": (1.0, 4.0),
}  # fmt: skip
"""With classifier-free guidance, where the family has it, and without."""
SIZE, FRAMES = 32, 5
PLAN = SamplingPlan(sigmas=(1.0, 0.8, 0.5, 0.2, 0.0), window=range(3), noise_level=0.7)


def measure(
    family: str, folder: Path, trained: Trained, dtype: torch.dtype
) -> dict[tuple[float, int], float]:
    """Largest |ratio - 1| by guidance and by rows of the replay; four samples are generated."""
    model = load_moved(tiny_models.save(family, folder), trained, dtype)
    frames = FRAMES if family in tiny_models.VIDEO else 1
    shape = model.latent_shape(height=SIZE, width=SIZE, frames=frames)
    found = {}
    for guidance in GUIDANCES[family]:
        conditions = model.encode(tiny_models.PROMPT, guidance=guidance)
        denoising = Denoising(PLAN, seeds=[1, 2, 3, 4], shape=shape, device=torch.device("cpu"))
        four = repeat_rows(conditions, 4)
        denoise(partial(_velocity, model, four, guidance), denoising)
        path = denoising.trajectory()
        for rows in ROWS:
            errors = [
                _error(
                    model, path.latents[:rows], path.log_probs[:rows], step, conditions, guidance
                )
                for step in PLAN.window
            ]
            found[guidance, rows] = max(errors)
    return found


def load_moved(folder: Path, trained: Trained, dtype: torch.dtype) -> ModelAdapter:
    """With trained weights that are not those of the beginning."""
    cpu = torch.device("cpu")
    model = load_model(folder, {"transformer", "text", "decoder"}, device=cpu, dtype=dtype)
    if trained == "full":
        model.transformer.requires_grad_(True)
    else:
        spec = LoraSpec(
            rank=2, alpha=4.0, targets=tuple(model.lora_targets),
            excluded=tuple(model.lora_excluded), seed=0,
        )  # fmt: skip
        attach_lora(model.transformer, spec)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trained_parameters(model.transformer).values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.05 * noise.to(parameter.dtype))
    return model


def _velocity(
    model: ModelAdapter, conditions: Conditions, guidance: float, latents: Tensor, sigma: Tensor
) -> Tensor:
    return model.velocity(latents, sigma, conditions, guidance=guidance)


def _error(
    model: ModelAdapter,
    latents: Tensor,
    log_probs: Tensor,
    step: int,
    conditions: Conditions,
    guidance: float,
) -> float:
    """Replays as the trainer does, with gradients."""
    rows = len(latents)
    where = PLAN.step(torch.full((rows,), step))
    before, arrived = latents[:, step], latents[:, step + 1]
    velocity = _velocity(model, repeat_rows(conditions, rows), guidance, before, where.sigma)
    again = transition(velocity, before, where, arrived=arrived).log_prob.detach()
    return float((torch.exp(again - log_probs[:, step]) - 1).abs().max())


def main() -> None:
    echo = sys.stdout.write
    for dtype in (torch.float32, torch.bfloat16):
        for family in tiny_models.MODELS:
            for trained in ("lora", "full"):
                with tempfile.TemporaryDirectory() as folder:
                    worst = max(measure(family, Path(folder), trained, dtype).values())
                name = str(dtype).removeprefix("torch.")
                echo(f"{name:9} {family:14} {trained:5} {worst:.1e}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
