"""Which sizes of images a model can make, told from its folder without torch.

Latents are a decoder's factor smaller than the image, and the network takes patches of them: height
and width are multiples of both together.
"""

import json
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.models.catalogue import pipeline_class

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
