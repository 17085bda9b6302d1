"""Which model families there are, and what their adapters know, told from a folder without torch.

A folder may hold more than its adapter uses: the second expert of Wan2.2-A14B, say, which has the
same pipeline as Wan2.1. Its samples would be those of half a model, so it is refused.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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

_ONE_ENCODER = {"text_encoder", "tokenizer"}

_TWO_ENCODERS = _ONE_ENCODER | {"text_encoder_2", "tokenizer_2"}

COMPONENTS = {
    "StableDiffusion3Pipeline": _TWO_ENCODERS | {"text_encoder_3", "tokenizer_3"},
    "FluxPipeline": _TWO_ENCODERS,
    "QwenImagePipeline": _ONE_ENCODER,
    "WanPipeline": _ONE_ENCODER,
    "HunyuanVideoPipeline": _TWO_ENCODERS,
}
"""What a folder may hold besides `_NEEDED`: all that the adapter uses of ``model_index.json``."""

_NEEDED = {"transformer", "scheduler", "vae"}

TEXT_TOKENS = {
    "StableDiffusion3Pipeline": (128, 512),
    "FluxPipeline": (512, 512),
    "QwenImagePipeline": (1024, 1024),
    "WanPipeline": (512, 512),
    "HunyuanVideoPipeline": (256, 256),
}
"""Tokens of its longest prompt, and the most that its pipeline takes."""

NETWORK_KEYS = {
    "StableDiffusion3Pipeline": {
        "attention_head_dim", "caption_projection_dim", "dual_attention_layers", "in_channels",
        "joint_attention_dim", "num_attention_heads", "num_layers", "out_channels", "patch_size",
        "pooled_projection_dim", "pos_embed_max_size", "qk_norm", "sample_size",
    },
    "FluxPipeline": {
        "attention_head_dim", "axes_dims_rope", "guidance_embeds", "in_channels",
        "joint_attention_dim", "num_attention_heads", "num_layers", "num_single_layers",
        "out_channels", "patch_size", "pooled_projection_dim",
    },
    "QwenImagePipeline": {
        "attention_head_dim", "axes_dims_rope", "in_channels", "joint_attention_dim",
        "num_attention_heads", "num_layers", "out_channels", "patch_size",
        "pooled_projection_dim",  # in the published folder, and used by no network
    },
    "WanPipeline": {
        "attention_head_dim", "cross_attn_norm", "eps", "ffn_dim", "freq_dim", "in_channels",
        "num_attention_heads", "num_layers", "out_channels", "patch_size", "qk_norm",
        "rope_max_seq_len", "text_dim",
    },
    "HunyuanVideoPipeline": {
        "attention_head_dim", "guidance_embeds", "in_channels", "mlp_ratio", "num_attention_heads",
        "num_layers", "num_refiner_layers", "num_single_layers", "out_channels", "patch_size",
        "patch_size_t", "pooled_projection_dim", "qk_norm", "rope_axes_dim", "rope_theta",
        "text_embed_dim",
    },
}  # fmt: skip
"""Keys of the network's configuration that an adapter knows. Any other is a switch that has to be
off: null or false, as `image_dim` (image-to-video) and `zero_cond_t` (editing) are here."""


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
        UserError: if the folder is not a diffusers model, of a family without an adapter, or has
            parts or settings that its family's adapter does not know.
    """
    pipeline = pipeline_class(folder)
    if pipeline not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(f"model.folder: {folder} holds a {pipeline}; supported are: {known}")
    _check_known(folder, pipeline)
    return FAMILIES[pipeline]


def text_tokens(folder: Path, wanted: int | None) -> int:
    """Where a prompt is cut off, and padded to where the family has no text mask: ``wanted``, or
    by default what the family is used with.

    Raises:
        UserError: if the model does not take as many.
    """
    default, most = TEXT_TOKENS[pipeline_class(folder)]
    if wanted is not None and wanted > most:
        raise UserError(
            f"model.text_tokens: {wanted} is more than this model takes; at most {most}"
        )
    return default if wanted is None else wanted


def _check_known(folder: Path, pipeline: str) -> None:
    unknown = [
        *_unknown(folder / "model_index.json", COMPONENTS[pipeline] | _NEEDED),
        *_unknown(folder / "transformer" / "config.json", NETWORK_KEYS[pipeline]),
    ]
    if unknown:
        raise UserError(
            f"model.folder: {folder} has {', '.join(unknown)}, which the adapter of {pipeline} "
            "does not know: it would leave them out and make other samples; choose another model"
        )


def _unknown(file: Path, known: set[str]) -> Iterator[str]:
    """What is switched on in ``file`` and not in ``known``, as "name" or "name = value"."""
    try:
        plain: Mapping[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise UserError(f"model.folder: {file} is no JSON") from error
    for name, value in plain.items():
        if name in known or name.startswith("_") or value in (None, False, [None, None]):
            continue
        yield name if isinstance(value, list) else f"{name} = {json.dumps(value)}"


PACKED = ("FluxPipeline", "QwenImagePipeline")
"""Tokens of 2 x 2 latents."""


def check_size(folder: Path, table: str, *, height: int, width: int) -> None:
    """Raises UserError, which names the key of ``table``, unless the model in ``folder`` makes
    images of ``height`` x ``width`` pixels."""
    multiple, most = pixels_per_token(folder), largest_side(folder)
    for name, size in (("height", height), ("width", width)):
        if size % multiple:
            nearest = max(multiple, round(size / multiple) * multiple)
            raise UserError(
                f"{table}.{name}: {size} is not a multiple of {multiple}; nearest is {nearest}"
            )
        if most is not None and size > most:
            raise UserError(f"{table}.{name}: {size} is more than this model knows; at most {most}")


def pixels_per_token(folder: Path) -> int:
    """Each way. Raises UserError if the folder does not say it."""
    pipeline, decoder = pipeline_class(folder), read_config(folder, "vae")
    if pipeline in PACKED:
        return 2 * _decoder_factor(pipeline, decoder)
    patch = read_config(folder, "transformer")["patch_size"]
    side = patch if isinstance(patch, int) else patch[1]  # or (frames, rows, columns)
    return int(side) * _decoder_factor(pipeline, decoder)


def largest_side(folder: Path) -> int | None:
    """Pixels, where the network has learned positions up to some number; elsewhere None."""
    if pipeline_class(folder) != "StableDiffusion3Pipeline":
        return None
    most = read_config(folder, "transformer").get("pos_embed_max_size")
    return None if most is None else int(most) * pixels_per_token(folder)


def _decoder_factor(pipeline: str, decoder: dict[str, Any]) -> int:
    """Pixels per latent, each way."""
    match pipeline:
        case "QwenImagePipeline":
            return int(2 ** len(decoder["temperal_downsample"]))
        case "WanPipeline":
            return int(decoder.get("scale_factor_spatial", 8))
        case "HunyuanVideoPipeline":
            return int(decoder.get("spatial_compression_ratio", 8))
        case _:
            return int(2 ** (len(decoder["block_out_channels"]) - 1))


def read_config(folder: Path, part: str) -> dict[str, Any]:
    """Of the decoder ("vae") or the network ("transformer")."""
    file = folder / part / "config.json"
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    except (OSError, ValueError) as error:
        raise UserError(f"model.folder: {file} cannot be read, or is no JSON") from error
