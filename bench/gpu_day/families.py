"""Samples and trains a tiny network of every family on the device that there is.

The ratio of a replay to its sample is 1 but for rounding, and the same noise gives about the same
samples on every device.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData
from shared.diffusion.generation import Generator
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.sampling.tensors import unpack, unpack_trajectory
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.messages.contracts import Fragment, GenerateFragment, Policy, Prompt
from shared.recipe.recipe import Recipe, load_recipe
from tests import tiny_models

if TYPE_CHECKING:
    from bench.gpu_day.day import Day

DTYPES = ("float32", "bfloat16")
GUIDANCE = {"sd3": 4.5, "flux": 3.5, "qwen-image": 4.0, "wan": 4.0, "hunyuan-video": 6.0}
SAMPLES, WINDOW = 4, 3
CHUNKS = (Chunk(1, 1), Chunk(1, WINDOW), Chunk(2, WINDOW), Chunk(SAMPLES, WINDOW))
"""Passes of 1, 3, 6 and 12 rows."""


def measure(day: "Day") -> dict[str, Any]:
    """Returns, by family and type, the largest error of a ratio by rows of a pass, the norm of the
    gradient, and the latents that the same noise has given."""
    found: dict[str, Any] = {"device": _device()}
    for family in tiny_models.FAMILIES:
        folder = day.folder / "tiny" / family
        if not (folder / "model_index.json").is_file():
            tiny_models.save(family, folder)
        found[family] = {dtype: _measured(family, folder, dtype) for dtype in DTYPES}
    return found


def _device() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


def _measured(family: str, model: Path, dtype: str) -> dict[str, Any]:
    recipe = _recipe(family, model, dtype)
    loaded = load_policy(recipe, {"transformer", "text", "decoder"})
    _move(loaded)
    generator = Generator(recipe, loaded)
    made = generator.generate(_task())
    group = GroupData(
        trajectories=(made.trajectory,),
        conditions=generator.conditions(tiny_models.PROMPT),
        advantages=(1.0, -1.0, 0.5, -0.5),
    )
    engine = TrainerEngine(recipe, loaded)
    errors, norm = {}, 0.0
    for chunk in CHUNKS:
        engine.begin()
        engine.train(engine.read(group), chunk)
        errors[str(chunk.rows)] = engine.tally["onpolicy_ratio_error"]
        norm = float(torch.stack([each.norm() for each in engine.gradient().values()]).norm())
    images = unpack(made.media)["images"]
    return {
        "ratio_error": errors,
        "gradient_norm": norm,
        "pixels": {"shape": list(images.shape), "mean": float(images.float().mean())},
        "latents": unpack_trajectory(made.trajectory).latents[:, -1].flatten()[:64].tolist(),
    }


def _move(loaded: LoadedPolicy) -> None:
    """Gives the adapter values that change what is sampled, the same on every device."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trained_parameters(loaded.model.transformer).values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.05 * noise.to(parameter))


def _task() -> GenerateFragment:
    return GenerateFragment(
        fragment=Fragment(batch=0, group=0, first_sample=0, num_samples=SAMPLES, attempt=0),
        policy=Policy(version=0, weights_digest="0" * 64),
        prompt=Prompt(text=tiny_models.PROMPT),
        window_start=0,
        worker="gpu-day",
    )


def _recipe(family: str, model: Path, dtype: str) -> Recipe:
    """Writes and reads the recipe: everything but its model is the same for all families."""
    prompts = model.parent / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": tiny_models.PROMPT, "metadata": {}}) + "\n")
    tables = {
        "run": {"name": family, "steps": 1},
        "model": {
            "folder": str(model), "height": 32, "width": 32, "dtype": dtype,
            "frames": 5 if family in tiny_models.VIDEO else 1,
            "guidance": GUIDANCE[family], "lora": {"rank": 4, "alpha": 8.0},
        },
        "data": {"prompts": str(prompts)},
        "sampling": {"steps": 5, "sigmas": "linear", "window": WINDOW, "noise_level": 0.7},
        "batch": {"groups": 1, "group_size": SAMPLES},
        "trainer": {"learning_rate": 1e-4},
        "reward": {"scorers": [{"name": "texture", "type": "jpeg-incompressibility"}]},
    }  # fmt: skip
    path = model.parent / f"{family}-{dtype}.json"
    path.write_text(json.dumps(tables))
    return load_recipe(path)
