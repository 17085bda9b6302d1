"""How far from 1 the ratio of a replay is before anything is trained: all families, batch sizes.

    python -m tests.shared.diffusion.ratio_error

prints the largest of each, in float32 and in bfloat16, also of networks that `model.weights` holds
in fewer bits; then the ratios to samples of the same network in other forms, as `rollout.weights`
makes them.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from shared.diffusion.loading.models import Conditions, ModelAdapter, load_model, repeat_rows
from shared.diffusion.sampling.sampler import Denoising, SamplingPlan, Trajectory, denoise
from shared.diffusion.sampling.transition import transition
from shared.diffusion.weights.streaming import stream
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.models.memory import UNQUANTISED, Form, ModelPart, WeightsHolding
from tests import tiny_models

Trained = Literal["lora", "full"]
ROWS = (1, 2, 3, 4)
GUIDANCES = {
    "sd3": (1.0, 4.0), "flux": (3.5,), "qwen-image": (1.0, 4.0), "wan": (1.0, 4.0),
    "hunyuan-video": (3.5,), "sd3-large": (1.0, 4.0), "wan-small": (1.0, 4.0),
    "wan22": (1.0, 4.0), "flux2": (3.5,), "flux2-klein": (1.0, 4.0), "z-image": (1.0, 4.0),
    "hunyuan-video15": (1.0, 4.0), "flux-kontext": (2.5,), "qwen-image-edit": (1.0, 4.0),
    "wan-i2v": (1.0, 4.0), "wan22-i2v": (1.0, 4.0),
    "ltx2": (1.0, 4.0),
}  # fmt: skip
"""With classifier-free guidance, where the family has it, and without."""
FORMS: tuple[Form, ...] = ("bf16", "int8", "w8a8", "fp8", "nf4")
BASES: tuple[tuple[Trained, Form | None], ...] = (
    ("lora", None), ("full", None), ("lora", "int8"), ("lora", "fp8"), ("lora", "nf4"),
)  # fmt: skip
CPU = torch.device("cpu")
SIZE, FRAMES = 32, 5
PLAN = SamplingPlan(sigmas=(1.0, 0.8, 0.5, 0.2, 0.0), window=range(3), noise_level=0.7)


def measure(
    family: str, folder: Path, trained: Trained, dtype: torch.dtype, form: Form | None = None
) -> dict[tuple[float, int], float]:
    """Largest |ratio - 1| by guidance and by rows of the replay; four samples are generated."""
    model = load_moved(tiny_models.save(family, folder), trained, dtype, WeightsHolding(form))
    found = own_ratios(family, model)
    return {key: float((each - 1).abs().max()) for key, each in found.items()}


def own_ratios(family: str, model: ModelAdapter) -> dict[tuple[float, int], Tensor]:
    """Ratios of a network to itself, by guidance and by rows of the replay."""
    found = {}
    for guidance in GUIDANCES[family]:
        conditions = encoded(family, model, guidance)
        path = sample(family, model, conditions, guidance)
        for rows in ROWS:
            steps = (_ratios(model, path, rows, s, conditions, guidance) for s in PLAN.window)
            found[guidance, rows] = torch.cat(list(steps))
    return found


def ratios(family: str, folder: Path, dtype: torch.dtype, form: Form | None) -> Tensor:
    """Ratios (rows,) of the trainer's network to one in another form, which has sampled."""
    trainer, rollout = each_held(family, folder, UNQUANTISED, WeightsHolding(form), dtype=dtype)
    found = []
    for guidance in GUIDANCES[family]:
        conditions = encoded(family, trainer, guidance)
        path = sample(family, rollout, conditions, guidance)
        found += [_ratios(trainer, path, 4, step, conditions, guidance) for step in PLAN.window]
    return torch.cat(found)


def encoded(family: str, model: ModelAdapter, guidance: float) -> Conditions:
    found: Conditions = tiny_models.encoded(family, model, guidance, SIZE)
    return found


def sample(family: str, model: ModelAdapter, conditions: Conditions, guidance: float) -> Trajectory:
    """Four samples of one prompt."""
    frames = FRAMES if family in tiny_models.VIDEO else 1
    shape = model.latent_shape(height=SIZE, width=SIZE, frames=frames)
    denoising = Denoising(PLAN, seeds=[1, 2, 3, 4], shape=shape, device=CPU)
    denoise(partial(_velocity, model, repeat_rows(conditions, 4), guidance), denoising)
    return denoising.trajectory()


def each_held(
    family: str, folder: Path, *holdings: WeightsHolding, dtype: torch.dtype = torch.float32
) -> list[ModelAdapter]:
    """Save a family's model, and load it with an adapter that has moved, held in each way."""
    tiny_models.save(family, folder)
    return [load_moved(folder, "lora", dtype, holding) for holding in holdings]


def load_moved(
    folder: Path, trained: Trained, dtype: torch.dtype, holding: WeightsHolding = UNQUANTISED
) -> ModelAdapter:
    """Load a model whose trained weights have moved, by the same steps however it is held."""
    parts: set[ModelPart] = {"transformer", "text", "decoder"}
    model = load_model(folder, parts, device=CPU, dtype=dtype, holding=holding)
    if trained == "full":
        model.transformer.requires_grad_(True)
    else:
        tiny_models.add_lora(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trained_parameters(model.transformer).values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.05 * noise.to(parameter.dtype))
    if holding.memory == "streamed":
        stream(model.transformer, CPU)
    return model


def _velocity(
    model: ModelAdapter, conditions: Conditions, guidance: float, latents: Tensor, sigma: Tensor
) -> Tensor:
    return model.velocity(latents, sigma, conditions, guidance=guidance)


def _ratios(
    model: ModelAdapter,
    path: Trajectory,
    rows: int,
    step: int,
    conditions: Conditions,
    guidance: float,
) -> Tensor:
    """Replays the first ``rows`` samples as the trainer does, with gradients: ratios (rows,)."""
    where = PLAN.step(torch.full((rows,), step))
    before, arrived = path.latents[:rows, step], path.latents[:rows, step + 1]
    velocity = _velocity(model, repeat_rows(conditions, rows), guidance, before, where.sigma)
    again = transition(velocity, before, where, arrived=arrived).log_prob.detach()
    return torch.exp(again - path.log_probs[:rows, step])


def main() -> None:
    echo = sys.stdout.write
    for dtype in (torch.float32, torch.bfloat16):
        for family in tiny_models.MODELS:
            for trained, form in BASES:
                with tempfile.TemporaryDirectory() as folder:
                    worst = max(measure(family, Path(folder), trained, dtype, form).values())
                echo(f"{_name(dtype):9} {family:14} {trained:5} {form or ''!s:5} {worst:.1e}\n")
    for dtype in (torch.float32, torch.bfloat16):
        for form in FORMS:
            for family in tiny_models.MODELS:
                echo(f"{_name(dtype):9} {family:14} {form:5} {_against(family, dtype, form)}\n")


def _against(family: str, dtype: torch.dtype, form: Form) -> str:
    with tempfile.TemporaryDirectory() as folder:
        found = ratios(family, Path(folder), dtype, form).double()
    share = float(found.sum() ** 2 / (len(found) * (found**2).sum()))
    error = float((found - 1).abs().max())
    return f"largest {error:.1e} mean {float(found.mean()) - 1:+.1e} uncounted {1 - share:.1e}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
