"""How plain diffusers samples a recipe's model with an exported adapter: code to copy."""

import json
import re
from pathlib import Path
from typing import Any

from shared.diffusion_families import VIDEO, pipeline_class
from shared.recipe import Model, Recipe

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SD3_TOKENS = 128
"""Of the T5 prompt, as sampling and training have it; diffusers' own default is longer."""


def base_model(folder: Path) -> str:
    """The name on the hub, where the folder says it, otherwise the folder's own."""
    name = _read(folder / "model_index.json").get("_name_or_path")
    is_hub_name = isinstance(name, str) and _HUB_NAME.fullmatch(name) and not Path(name).exists()
    return str(name) if is_hub_name else folder.name


def makes_videos(model: Model) -> bool:
    return pipeline_class(model.folder) in VIDEO


def usage(recipe: Recipe, prompt: str) -> str:
    """Python that loads the adapter from its own folder and makes a sample of ``prompt``."""
    model = recipe.model
    sizes = {"height": model.height, "width": model.width}
    if makes_videos(model):
        sizes["num_frames"] = model.frames
    arguments = {**sizes, "num_inference_steps": recipe.sampling.steps, **_told(model)}
    made, taken = ("video", "frames[0]") if makes_videos(model) else ("image", "images[0]")
    base = base_model(model.folder)
    where = "" if "/" in base else "  # the base model's folder"
    return "\n".join([
        "import torch",
        "from diffusers import DiffusionPipeline",
        "",
        f"pipeline = DiffusionPipeline.from_pretrained("
        f"{json.dumps(base)}, dtype=torch.{model.dtype}){where}",
        'pipeline.load_lora_weights(".")  # this folder, or the repository that it is in',
        f"{made} = pipeline(",
        f"    {json.dumps(prompt, ensure_ascii=False)},",
        *(f"    {name}={value!r}," for name, value in arguments.items()),
        f").{taken}",
    ])  # fmt: skip


def _told(model: Model) -> dict[str, Any]:
    """What the pipeline is told as the network was told it in training."""
    match pipeline_class(model.folder):
        case "QwenImagePipeline":
            return {"true_cfg_scale": model.guidance, "negative_prompt": ""}
        case "StableDiffusion3Pipeline":
            tokenizer = _read(model.folder / "tokenizer_3" / "tokenizer_config.json")
            tokens = min(_SD3_TOKENS, int(tokenizer.get("model_max_length", _SD3_TOKENS)))
            return {"guidance_scale": model.guidance, "max_sequence_length": tokens}
        case _:
            return {"guidance_scale": model.guidance}


def _read(path: Path) -> dict[str, Any]:
    """Nothing where there is no such file."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found
