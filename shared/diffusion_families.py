"""Which model families there are, told from a folder without torch."""

import json
from pathlib import Path

from shared.errors import UserError

FAMILIES = {
    "StableDiffusion3Pipeline": "shared.diffusion.families.sd3:StableDiffusion3",
    "FluxPipeline": "shared.diffusion.families.flux:Flux",
    "QwenImagePipeline": "shared.diffusion.families.qwen_image:QwenImage",
    "WanPipeline": "shared.diffusion.families.wan:Wan",
    "HunyuanVideoPipeline": "shared.diffusion.families.hunyuan_video:HunyuanVideo",
}
"""The pipeline that a model folder names -> its adapter."""
VIDEO = ("WanPipeline", "HunyuanVideoPipeline")
"""Of them, those whose samples are videos."""


def pipeline_class(folder: Path) -> str:
    """Raises UserError if the folder is not a diffusers model."""
    index = folder / "model_index.json"
    try:
        return str(json.loads(index.read_text())["_class_name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"model.folder: {folder} is not a diffusers model (no readable {index.name})"
        ) from error


def adapter_of(folder: Path) -> str:
    """The import string of the folder's adapter.

    Raises:
        UserError: if the folder is not a diffusers model, or of a family without an adapter.
    """
    pipeline = pipeline_class(folder)
    if pipeline not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(f"model.folder: {folder} holds a {pipeline}; supported are: {known}")
    return FAMILIES[pipeline]
