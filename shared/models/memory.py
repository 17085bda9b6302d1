"""How much memory a model folder's weights take, read from file headers without loading them."""

import json
import math
import re
import struct
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from shared.errors import UserError

Part = Literal["transformer", "text", "decoder"]
"""transformer: the network that is trained; text: prompt encoders; decoder: latents to pixels."""

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
DECODER_BYTES = 4
"""Decoders are held in float32 at least, whatever the type of the rest."""
MAX_HEADER = 64 * 1024 * 1024
WHOLE = ("model.safetensors", "diffusion_pytorch_model.safetensors")
"""What a part's file is called if it is one, by transformers and by diffusers."""
INDEX = ".safetensors.index.json"
VARIANT = re.compile(r"\.(fp16|bf16|fp8|int8|ema|non_ema)[.-]")
"""Begins the name of a second set of the same weights in the name of its file."""


def weight_bytes(folder: Path, dtype: str, parts: Collection[Part]) -> int:
    """Bytes of the weights that diffusers loads of these parts, held as ``dtype``.

    Parts are those that model_index.json names; other files in the folder, such as all weights
    once more in a single file, and second sets of a part in another type do not count.

    Raises:
        UserError: if the folder is no model, or a file no safetensors file.
    """
    return sum(
        num_weights(folder, part)
        * (max(DECODER_BYTES, ITEM_BYTES[dtype]) if part == "decoder" else ITEM_BYTES[dtype])
        for part in parts
    )


def num_weights(folder: Path, part: Part) -> int:
    """Raises UserError if the folder is no model, or a file no safetensors file."""
    return sum(math.prod(shape) for _, shape in _tensors(folder, part))


def adapter_bytes(
    folder: Path, rank: int, targets: Sequence[str], excluded: Sequence[str] = ()
) -> int:
    """Bytes of a LoRA adapter in float32: of the network's matrices whose modules end in one of
    ``targets`` and do not begin with one of ``excluded``.

    Raises:
        UserError: if the folder is no model, or a file no safetensors file.
    """
    ends = tuple(f".{target}.weight" for target in targets)
    return sum(
        rank * (math.prod(shape) // shape[0] + shape[0]) * ITEM_BYTES["float32"]
        for name, shape in _tensors(folder, "transformer")
        if f".{name}".endswith(ends) and len(shape) > 1 and not name.startswith(tuple(excluded))
    )


def _tensors(folder: Path, part: Part) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes."""
    for name in _names(folder, part):
        for file in weight_files(folder / name):
            for tensor, told in _header(file).items():
                if tensor != "__metadata__":
                    yield tensor, told["shape"]


def _names(folder: Path, part: Part) -> list[str]:
    """Folders of a part, which model_index.json names."""
    index = folder / "model_index.json"
    try:
        plain: dict[str, Any] = json.loads(index.read_text())
        there = [name for name, told in plain.items() if isinstance(told, list) and all(told)]
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"model.folder: {folder} is not a diffusers model (no readable {index.name})"
        ) from error
    begin = {"transformer": "transformer", "text": "text_encoder", "decoder": "vae"}[part]
    return [name for name in there if name.startswith(begin)]


def weight_files(folder: Path) -> list[Path]:
    """Those of a part that are loaded: one file, or the pieces that an index names, or what there
    is."""
    for name in WHOLE:
        if (folder / name).is_file():
            return [folder / name]
    for index in sorted(folder.glob(f"*{INDEX}")):
        if not VARIANT.search(index.name):
            return _pieces(index)
    found = sorted(folder.glob("*.safetensors"))
    return [file for file in found if not VARIANT.search(file.name)]


def _pieces(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"model.folder: {index} is no index of weights") from error
    return [index.parent / str(name) for name in sorted(names)]


def _header(file: Path) -> dict[str, dict[str, list[int]]]:
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > MAX_HEADER:
                raise ValueError("its header is too long")
            header: dict[str, dict[str, list[int]]] = json.loads(stream.read(size))
            return header
    except (OSError, ValueError, struct.error) as error:
        raise UserError(f"model.folder: {file} is not a safetensors file: {error}") from error
