"""Small random models of every family, as diffusers folders: what the real ones are loaded by."""

import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args
from unittest import mock

import numpy as np
import pytest
import torch

from shared.diffusion.families.base import Family
from shared.diffusion.families.latents import pack, unpack
from shared.diffusion.loading.models import ModelAdapter, load_model
from shared.diffusion.policy import LoraSpec, attach_lora
from shared.models.families import FAMILIES as FAMILIES_BY_PIPELINE
from shared.models.memory import ModelPart
from tests import tiny_ltx2
from tests.tiny_pipelines import BUILDERS

FAMILIES = ("sd3", "flux", "qwen-image", "wan", "hunyuan-video")
OTHERS = (
    "sd3-large", "wan-small", "wan22", "flux2", "flux2-klein", "z-image", "hunyuan-video15",
    "flux-kontext", "ltx2", "qwen-image-edit", "wan-i2v", "wan22-i2v",
)  # fmt: skip
"""Models of a family that are not shaped like its first: no dual attention, other heads, two
networks; and families that only the slow tests go through."""
MODELS = (*FAMILIES, *OTHERS)
EDITS = ("flux-kontext", "qwen-image-edit", "wan-i2v", "wan22-i2v")
"""Models that edit an image."""
PACKED = ("flux", "qwen-image", "flux-kontext", "qwen-image-edit")
VIDEO = (
    "wan",
    "hunyuan-video",
    "wan-small",
    "wan22",
    "hunyuan-video15",
    "ltx2",
    "wan-i2v",
    "wan22-i2v",
)
CFG = (
    "sd3",
    "qwen-image",
    "wan",
    *(name for name in OTHERS if name not in ("flux2", "flux-kontext")),
)
"""Models that take their guidance as a second half of the batch."""
PROMPT = "a handwritten five"


def but_slow(quick: Collection[str], names: Collection[str] = MODELS) -> list[Any]:
    """Return models as parameters of tests, all of which but the quick ones are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def build(family: str, seed: int = 0) -> Any:
    """A whole pipeline, frozen and without progress bars."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = BUILDERS[family]()
    pipeline.set_progress_bar_config(disable=True)
    for module in pipeline.components.values():
        if isinstance(module, torch.nn.Module):
            module.requires_grad_(False).eval()
    return pipeline


@cache
def _saved(family: str, seed: int) -> "TemporaryDirectory[str]":
    kept = TemporaryDirectory(ignore_cleanup_errors=True)
    build(family, seed).save_pretrained(kept.name)
    return kept


def save(family: str, folder: Path, seed: int = 0) -> Path:
    """Copy the model, which a process builds once."""
    shutil.copytree(_saved(family, seed).name, folder, dirs_exist_ok=True)
    return folder


def load(folder: Path, **given: Any) -> Family:
    """Load all parts of a model in float32."""
    given = {"dtype": torch.float32, **given}
    model = load_model(folder, set(get_args(ModelPart)), device=torch.device("cpu"), **given)
    assert isinstance(model, Family)
    return model


def add_lora(model: ModelAdapter) -> None:
    """Give every network of a model a small LoRA."""
    targets, excluded = tuple(model.lora_targets), tuple(model.lora_excluded)
    spec = LoraSpec(rank=2, alpha=4.0, targets=targets, excluded=excluded, seed=0)
    attach_lora(model.transformer, spec)


def run(
    family: str,
    pipeline: Any,
    start: torch.Tensor,
    *,
    guidance: float,
    output: str,
    height: int,
    width: int,
    frames: int,
    steps: int,
    guidance_2: float | None = None,
    negative: str | None = None,
) -> torch.Tensor:
    """What diffusers makes of the noise ``start`` (B, ...): latents, or pixels in [0, 1]."""
    if family == "qwen-image-edit" and len(start) > 1:  # its pipeline takes a prompt for an image
        return torch.cat([
            run(
                family, pipeline, each[None], guidance=guidance, output=output, height=height,
                width=width, frames=frames, steps=steps, negative=negative,
            )
            for each in start
        ])  # fmt: skip
    call = _guidance(family, pipeline, guidance)
    call |= _negative(family, pipeline, [negative] * len(start))
    if guidance_2 is not None:
        call["guidance_scale_2"] = guidance_2
    if family in ("sd3", "sd3-large"):
        call["max_sequence_length"] = pipeline.tokenizer_3.model_max_length
    if family in VIDEO:
        call["num_frames"] = frames
    if family in EDITS:
        call |= {"image": picture(height, width), **_UNSCALED.get(family, _nothing)(height, width)}
    noise = pack(start) if family in PACKED else start.clone()
    if family == "ltx2":
        noise, call["audio_latents"] = tiny_ltx2.tokens(pipeline, start)
    with _changed(family, height, width):
        result = pipeline(
            prompt=[PROMPT] * len(start), height=height, width=width, num_inference_steps=steps,
            output_type=output, latents=noise, **call,
        )  # fmt: skip
    found = torch.as_tensor(result.frames if family in VIDEO else result.images)
    if family == "ltx2" and output == "latent":
        return tiny_ltx2.joined(pipeline, found, result.audio, start)
    return _unpacked(family, pipeline, found, start) if output == "latent" else found


def _guidance(family: str, pipeline: Any, guidance: float) -> dict[str, Any]:
    """The arguments by which a pipeline is given a guidance."""
    if family.startswith("qwen-image"):
        return {"true_cfg_scale": guidance, "negative_prompt": ""}
    if family == "hunyuan-video15":
        pipeline.guider = pipeline.guider.new(guidance_scale=guidance)
        return {}
    if family == "ltx2":
        return dict(FAMILIES_BY_PIPELINE[type(pipeline).__name__].guidance_arguments(guidance))
    return {"guidance_scale": guidance - 1 if family == "z-image" else guidance}


def _negative(family: str, pipeline: Any, texts: list[str | None]) -> dict[str, Any]:
    if texts[0] is None:
        return {}
    if family == "flux2-klein":  # takes its embedding alone
        return {"negative_prompt_embeds": pipeline.encode_prompt(texts)[0]}
    return {"negative_prompt": texts}


def _unpacked(
    family: str, pipeline: Any, latents: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    """The pipeline's latents in the shape of ``start``."""
    if family in PACKED:
        return unpack(latents, *start.shape[-2:])
    if family == "flux2":
        return latents.transpose(1, 2).reshape(start.shape)
    if family == "flux2-klein":
        return _as_the_network_s(pipeline, latents)
    return latents


def _nothing(height: int, width: int) -> dict[str, Any]:
    return {}


_UNSCALED: Mapping[str, Callable[[int, int], dict[str, Any]]] = {
    "flux-kontext": lambda height, width: {"max_area": height * width, "_auto_resize": False}
}
"""Arguments by which a pipeline leaves the picture at its size."""


def _changed(family: str, height: int, width: int) -> Any:
    """Has Qwen-Image-Edit's pipeline leave the picture at its size, and that of Wan's models which
    begin with an image do without ftfy, as that of the others does."""
    if family.endswith("i2v"):
        from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v

        return mock.patch.object(pipeline_wan_i2v, "basic_clean", pipeline_wan.basic_clean)
    if family != "qwen-image-edit":
        return nullcontext()
    return mock.patch(
        "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit.calculate_dimensions",
        lambda area, ratio: (width, height, None),
    )


def picture(height: int, width: int) -> Any:
    """A source image."""
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def source(family: str, height: int, width: int) -> torch.Tensor | None:
    """What a model of the family is given of it: (1, 3, H, W); None if it edits no image."""
    if family not in EDITS:
        return None
    return torch.from_numpy(np.asarray(picture(height, width)).copy()).permute(2, 0, 1)[None]


def encoded(family: str, model: Any, guidance: float, size: int, prompt: str = PROMPT) -> Any:
    """Conditions of the prompt, and of the picture where one is edited, of a square sample."""
    frames = 5 if family in VIDEO else 1
    image = source(family, size, size)
    return model.encode(prompt, guidance=guidance, image=image, frames=frames)


def _as_the_network_s(pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
    """Undoes what FLUX.2's pipeline does to latents before it decodes them."""
    norm = pipeline.vae.bn
    deviation = torch.sqrt(norm.running_var + pipeline.vae.config.batch_norm_eps)
    mean, deviation = (each.view(1, -1, 1, 1) for each in (norm.running_mean, deviation))
    found: torch.Tensor = (pipeline._patchify_latents(latents) - mean) / deviation
    return found


def pixels_per_token(family: str, pipeline: Any) -> int:
    """What diffusers' own pipeline multiplies."""
    if family in PACKED or family == "z-image":
        return int(2 * pipeline.vae_scale_factor)
    patch = pipeline.transformer.config.patch_size
    return int(_decoder_factor(family, pipeline) * (patch if isinstance(patch, int) else patch[1]))


def latent_shape(
    family: str, pipeline: Any, height: int, width: int, frames: int
) -> tuple[int, ...]:
    """Shape of the latents that diffusers' own pipeline draws for one sample, unpacked."""
    channels, factor = pipeline.transformer.config.in_channels, _decoder_factor(family, pipeline)
    if family == "hunyuan-video15":
        channels = pipeline.num_channels_latents
    if family.endswith("i2v"):
        channels = pipeline.vae.config.z_dim
    size = (height // factor, width // factor)
    if family == "ltx2":
        return tiny_ltx2.latent_shape(pipeline, *size, frames)
    if family in VIDEO:
        return (channels, (frames - 1) // pipeline.vae_scale_factor_temporal + 1, *size)
    return (channels // 4 if family in PACKED else channels, *size)


def _decoder_factor(family: str, pipeline: Any) -> int:
    name = "vae_scale_factor_spatial" if family in VIDEO else "vae_scale_factor"
    if family == "ltx2":
        name = "vae_spatial_compression_ratio"
    return int(getattr(pipeline, name)) * (2 if family.startswith("flux2") else 1)
