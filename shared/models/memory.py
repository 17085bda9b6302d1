"""Computes how much memory a model folder's weights take, from file headers alone."""

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from shared.errors import UserError
from shared.limits import MAX_FILE_HEADER_BYTES
from shared.models.model_errors import no_model

ModelPart = Literal["transformer", "text", "decoder"]
PARTS: tuple[ModelPart, ...] = get_args(ModelPart)
"""transformer: the network that is trained; text: prompt encoders; decoder: latents to pixels."""

Quantised = Literal["int8", "fp8", "nf4"]
"""Forms with fewer bits under an adapter that is trained: weights alone are quantised."""
Form = Literal["bf16", "int8", "w8a8", "fp8", "nf4"]
"""Forms in which a network's weights may be held that are not in `model.dtype`. w8a8 holds what
int8 holds, and quantises activations as well."""
Residence = Literal["resident", "streamed"]

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
DECODER_BYTES = 4
"""Minimum bytes of a decoder's weight: decoders are held in float32, for any other dtype."""
METADATA = "__metadata__"
"""Key of a safetensors header that is no tensor."""
LFS_POINTER = b"version "
"""First bytes of what Git LFS leaves in place of a file."""
SINGLE_FILE_NAMES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
"""Names of a part's file if it has only one, by transformers and by diffusers."""
INDEX = ".safetensors.index.json"
VARIANT = re.compile(r"\.(fp16|bf16|fp8|int8|ema|non_ema)[.-]")
"""Part of a file's name that marks a second set of the same weights."""
BLOCK = re.compile(r"(?:transformer(?:_2)?\.)?\w+\.\d+(?=\.)")
"""Beginning of the names of a block's weights: a network's own lists of layers hold its blocks. For
two networks, names begin with the folder."""
NF4_GROUP = 64
"""Weights of nf4 that share a scale; other forms have a scale per row of a matrix."""


@dataclass(frozen=True, slots=True)
class WeightsHolding:
    """How a process holds the network that it generates with."""

    weights: Form | None = None
    """Form of its weights; None is `model.dtype`."""
    memory: Residence = "resident"
    """resident: all of it is on the device. streamed: its blocks are on the host, and come to the
    device one after the other."""


UNQUANTISED = WeightsHolding()

MOMENTS = 2
"""Moments of each weight in Adam."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSets:
    """Copies of trained weights that a training device holds in addition to its network."""

    kept: int = 0
    """Number of sets that passes use (`shared.diffusion.weights.weight_sets`): an old policy, an
    adapter as reference, the start of a batch."""
    on_host: int = 0
    """Number of sets on the host, whose blocks come to a GPU one after the other: a reference of
    all weights."""
    ahead: int = 0
    """Number of further sets where a member steps ahead of the version in use."""
    averages: int = 0

    def size(self, of_passes: float, in_float32: float) -> float:
        """Returns the size of all but the gradient sums of passes, from the sizes of one set in the
        type that passes compute with and in float32. A member copies its sums, and holds the
        totals of all members."""
        has_masters = of_passes < in_float32
        numbers = MOMENTS + has_masters + self.averages + 2
        return (self.kept + self.ahead) * of_passes + numbers * in_float32


def weight_bytes(
    folder: Path, dtype: str, parts: Collection[ModelPart], holding: WeightsHolding = UNQUANTISED
) -> int:
    """Return the bytes that the weights of these parts take on a device, loaded by diffusers as
    ``dtype``, with the network held as in ``holding``.

    Only parts that model_index.json names count; other files of the folder, such as all weights in
    a single file or a second set of a part in another type, do not.

    Raises:
        UserError: if the folder is no model, or a file no safetensors file.
    """
    return sum(
        network_bytes(_tensors(folder, part), dtype, holding)
        if part == "transformer"
        else num_weights(folder, part) * _item_bytes(part, dtype)
        for part in parts
    )


def _item_bytes(part: ModelPart, dtype: str) -> int:
    return max(DECODER_BYTES, ITEM_BYTES[dtype]) if part == "decoder" else ITEM_BYTES[dtype]


def network_bytes(
    tensors: Iterable[tuple[str, Sequence[int]]], dtype: str, holding: WeightsHolding = UNQUANTISED
) -> int:
    """Returns the bytes that a network takes of a device, from names and shapes of its weights.

    Streamed, these are twice its largest block, as the next one comes while one is computed, and
    all that is outside of the blocks.
    """
    outside, blocks = 0, Counter[str]()
    for name, shape in tensors:
        size = _held_bytes(name, shape, dtype, holding.weights)
        if match := BLOCK.match(name):
            blocks[match[0]] += size
        else:
            outside += size
    if holding.memory == "streamed":
        return outside + 2 * max(blocks.values(), default=0)
    return outside + blocks.total()


def _held_bytes(name: str, shape: Sequence[int], dtype: str, form: Form | None) -> int:
    """Returns the bytes of one tensor. Only matrices of blocks are quantised."""
    count = math.prod(shape)
    if form == "bf16":
        return count * ITEM_BYTES["bfloat16"]
    if form is None or not is_block_matrix(name, shape):
        return count * ITEM_BYTES[dtype]
    if form == "nf4":
        groups = math.ceil(count / NF4_GROUP)
        return groups * (NF4_GROUP // 2 + ITEM_BYTES[dtype])
    return count + shape[0] * ITEM_BYTES[dtype]


def is_block_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is a matrix of a block, which can be quantised."""
    return len(shape) == 2 and name.endswith(".weight") and BLOCK.match(name) is not None


def num_weights(folder: Path, part: ModelPart) -> int:
    """Returns the number of weights; raises UserError if the folder is no model, or a file no
    safetensors file."""
    return sum(math.prod(shape) for _, shape in _tensors(folder, part))


def file_bytes(folder: Path, parts: Collection[ModelPart]) -> int:
    """Returns the size of the weight files of these parts; raises UserError if the folder is no
    model."""
    return sum(
        file.stat().st_size
        for part in parts
        for name in part_folders(folder, part)
        for file in weight_files(folder / name)
        if file.is_file()
    )


def adapter_bytes(
    folder: Path, rank: int, targets: Sequence[str], excluded: Sequence[str] = ()
) -> int:
    """Returns the bytes of a LoRA adapter in float32, of the network's matrices whose modules end
    in one of ``targets`` and do not begin with one of ``excluded``. If there are two networks,
    names begin with the folder.

    Raises:
        UserError: if the folder is no model, or a file no safetensors file.
    """
    ends = tuple(f".{target}.weight" for target in targets)
    return sum(
        rank * (math.prod(shape) // shape[0] + shape[0]) * ITEM_BYTES["float32"]
        for name, shape in _tensors(folder, "transformer")
        if f".{name}".endswith(ends) and len(shape) > 1 and not name.startswith(tuple(excluded))
    )


def layer_shapes(folder: Path) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of the linear layers of a model's network by name; if there are two
    networks, names begin with the folder.

    Raises:
        UserError: if the folder is no model, or a file no safetensors file.
    """
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in _tensors(folder, "transformer")
        if len(shape) == 2 and name.endswith(".weight")
    }


def _tensors(folder: Path, part: ModelPart) -> Iterator[tuple[str, list[int]]]:
    """Yields the names and shapes of a part's tensors. If it has several folders, the names begin
    with theirs."""
    names = part_folders(folder, part)
    for name in names:
        prefix = f"{name}." if len(names) > 1 else ""
        for file in weight_files(folder / name):
            for tensor, entry in read_header(file)[0].items():
                if tensor != METADATA:
                    yield prefix + tensor, entry["shape"]


def part_folders(folder: Path, part: ModelPart) -> list[str]:
    """Returns the folders of a part that model_index.json names; raises UserError if the folder is
    no model."""
    index = folder / "model_index.json"
    try:
        plain: dict[str, Any] = json.loads(index.read_text())
        parts = [name for name, entry in plain.items() if isinstance(entry, list) and all(entry)]
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(no_model(folder)) from error
    begin = {
        "transformer": ("transformer",),
        "text": ("text_encoder", "connectors", "image_encoder"),
        "decoder": ("vae",),
    }[part]
    return [name for name in parts if name.startswith(begin)]


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of a part that are loaded: the only one, or those that an index names, or
    all that there are."""
    names = [file.name for file in folder.glob("*.safetensors*")]
    return [folder / name for name in weight_names(names, lambda index: pieces(folder / index))]


def weight_names(
    names: Collection[str], pieces_of: Callable[[str], Sequence[str]]
) -> Sequence[str]:
    """Returns which of the files in a part's folder are its weights, as they are loaded.

    Args:
        pieces_of: returns the names that an index lists.
    """
    for name in SINGLE_FILE_NAMES:
        if name in names:
            return [name]
    kept = [name for name in sorted(names) if not VARIANT.search(name)]
    for name in kept:
        if name.endswith(INDEX):
            return pieces_of(name)
    return [name for name in kept if name.endswith(".safetensors")]


def pieces(index: Path) -> list[str]:
    """Returns the names of the files that an index of weights lists.

    Raises:
        UserError: if it is invalid.
    """
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"model.folder: {index} is no index of weights") from error
    return sorted(map(str, names))


def read_header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return each tensor's entry in the header of a safetensors file, and the byte of the file at
    which the tensors begin.

    Raises:
        UserError: if it is no safetensors file.
    """
    try:
        with file.open("rb") as stream:
            begin = stream.read(8)
            if begin == LFS_POINTER:
                raise ValueError("it is a pointer of Git LFS; fetch the file itself, git lfs pull")
            if len(begin) < 8:
                raise ValueError("it is empty; fetch it once more")
            (size,) = struct.unpack("<Q", begin)
            if size > MAX_FILE_HEADER_BYTES and begin.lstrip().startswith(b"<"):
                raise ValueError("it is a web page; fetch it once more")
            if size > MAX_FILE_HEADER_BYTES:
                raise ValueError("its header is too long; copy or fetch it once more")
            text = stream.read(size)
            if len(text) < size:
                raise ValueError("it is broken off; copy or fetch it once more")
            header: Any = json.loads(text)
            if not isinstance(header, dict):
                raise ValueError("its header is no JSON object")
            return header, 8 + size
    except (OSError, ValueError, struct.error) as error:
        raise UserError(f"model.folder: {file} is not a safetensors file: {error}") from error
