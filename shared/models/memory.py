"""Computes how much memory a model folder's weights take, from file headers alone."""

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
"""Bytes of a decoder's weight, at least: decoders are held in float32, whatever the rest is."""
MAX_HEADER = 64 * 1024 * 1024
WHOLE = ("model.safetensors", "diffusion_pytorch_model.safetensors")
"""Names of a part's file if it has only one, by transformers and by diffusers."""
INDEX = ".safetensors.index.json"
VARIANT = re.compile(r"\.(fp16|bf16|fp8|int8|ema|non_ema)[.-]")
"""Part of a file's name that says it holds a second set of the same weights."""


def weight_bytes(folder: Path, dtype: str, parts: Collection[Part]) -> int:
    """Returns the bytes of the weights that diffusers loads of these parts, held as ``dtype``.

    Only parts that model_index.json names count; other files of the folder, such as all weights in
    a single file or a second set of a part in another type, do not.

    Raises:
        UserError: if the folder is no model, or a file no safetensors file.
    """
    return sum(
        num_weights(folder, part)
        * (max(DECODER_BYTES, ITEM_BYTES[dtype]) if part == "decoder" else ITEM_BYTES[dtype])
        for part in parts
    )


def num_weights(folder: Path, part: Part) -> int:
    """Returns the number of weights; raises UserError if the folder is no model, or a file no
    safetensors file."""
    return sum(math.prod(shape) for _, shape in _tensors(folder, part))


def adapter_bytes(
    folder: Path, rank: int, targets: Sequence[str], excluded: Sequence[str] = ()
) -> int:
    """Returns the bytes of a LoRA adapter in float32, of the network's matrices whose modules end
    in one of ``targets`` and do not begin with one of ``excluded``. Where there are two networks,
    names begin with that of the folder.

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
    """Yields the names and shapes of a part's tensors. If it has several folders, the names begin
    with theirs."""
    names = _names(folder, part)
    for name in names:
        prefix = f"{name}." if len(names) > 1 else ""
        for file in weight_files(folder / name):
            for tensor, entry in _header(file).items():
                if tensor != "__metadata__":
                    yield prefix + tensor, entry["shape"]


def _names(folder: Path, part: Part) -> list[str]:
    """Returns the folders of a part that model_index.json names."""
    index = folder / "model_index.json"
    try:
        plain: dict[str, Any] = json.loads(index.read_text())
        there = [name for name, made in plain.items() if isinstance(made, list) and all(made)]
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"model.folder: {folder} is not a diffusers model (no readable {index.name})"
        ) from error
    begin = {"transformer": "transformer", "text": "text_encoder", "decoder": "vae"}[part]
    return [name for name in there if name.startswith(begin)]


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of a part that are loaded: the only one, or those that an index names, or
    all that there are."""
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
