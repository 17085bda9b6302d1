"""Reads from a LoRA file, without torch, which layers of a model's network it adapts, and how.

The key names of diffusers, peft, Kohya's trainers and ComfyUI are known. A matrix that stands for
several layers of diffusers' network is cut into theirs: where it is made of blocks of its own for
each (zeros elsewhere), each layer gets its block; otherwise all share the rows of A.
"""

import contextlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.errors import UserError
from shared.models.catalogue import network_folders
from shared.models.families import EXPERTS
from shared.models.lora_names import HIGH, LOW, NamedLayers, prefix_of
from shared.models.memory import read_header

FILES = {HIGH: "pytorch_lora_weights.safetensors", LOW: "pytorch_lora_weights_2.safetensors"}
"""Files of the networks' adapters in diffusers' layout; the only network has the first."""
METADATA_KEY = "lora_adapter_metadata"
"""Key under which diffusers keeps rank and alpha in a file; without it, alpha is the rank."""
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"

Role = Literal["down", "up", "alpha"]

ALPHA = ".alpha"
ENDINGS: Mapping[str, Role] = {
    ".lora_A.weight": "down", ".lora_B.weight": "up",
    ".lora_A.default.weight": "down", ".lora_B.default.weight": "up",
    ".lora_down.weight": "down", ".lora_up.weight": "up",
    ".lora.down.weight": "down", ".lora.up.weight": "up",
    ALPHA: "alpha",
}  # fmt: skip
TEXT = re.compile(r"(base_model\.model\.)?(text_encoder|text_model|lora_te|te\d?[._]|clip)")
FORMATS = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i"}
FLOATS = ("F64", "F32", "F16", "BF16")
NEUTRAL = frozenset({
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "revision",
    "target_modules", "task_type",
})  # fmt: skip
"""Keys of peft's configuration that change nothing of how a plain LoRA is computed, or are read."""
PLAIN: Mapping[str, Sequence[object]] = {
    "peft_type": ("LORA",), "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
}  # fmt: skip
"""Values, besides those that say nothing, of the keys that may say that a LoRA is no plain one."""

KEY = "model.adapter"


@dataclass(frozen=True, slots=True)
class LoraPart:
    """Says where one layer's matrices are."""

    layer: str
    """Name in the network; of two networks, after that of the layer's own."""
    file: Path
    down: str
    """Name of A (rank, inputs) in the file."""
    up: str
    """Name of B (outputs, rank) in the file."""
    rows: tuple[int, int]
    """First row of B that is this layer's, and the one after the last."""
    ranks: tuple[int, int]
    """The same of the rows of A and the columns of B."""


@dataclass(frozen=True, slots=True)
class LoraFile:
    """Describes a LoRA: one rank and one alpha for all layers."""

    rank: int
    alpha: float
    parts: tuple[LoraPart, ...]
    targets: tuple[str, ...]
    """Suffixes of the names of the layers, as few as say it."""
    experts: Literal["both", "high", "low"]

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(part.layer for part in self.parts)


def read_lora(path: Path, folder: Path, key: str = KEY) -> LoraFile:
    """Reads the LoRA at ``path``, a file or a folder, for the model in ``folder``; ``key`` is what
    errors name.

    Raises:
        UserError: if it is not a plain LoRA of this model's network alone, of one rank and alpha.
    """
    networks = [each.name for each in network_folders(folder)]
    model = NamedLayers.of(folder, networks)
    found: list[_Scaled] = []
    for network, file in _files(path, networks, key).items():
        try:
            found += _read_file(file, network, model)
        except (ValueError, KeyError, TypeError, struct.error) as error:
            reason = error.args[0] if isinstance(error, ValueError) else f"cannot be read: {error}"
            raise UserError(f"{key}: {file} {reason}") from error
        except UserError as error:  # of a header
            raise UserError(str(error).replace("model.folder", key, 1)) from error
    return _uniform(path, found, model, key)


@dataclass(frozen=True, slots=True)
class _Scaled:
    part: LoraPart
    rank: int
    alpha: float


def _files(path: Path, networks: Sequence[str], key: str) -> dict[str, Path]:
    """Returns the file of each network that has one."""
    if not path.exists():
        raise UserError(f"{key}: {path} does not exist; name a safetensors file, or its folder")
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UserError(f"{key}: {path} is no safetensors file, and no other is read")
        if LOW in networks and "low" in path.stem.lower():
            raise UserError(
                f"{key}: {path} alone would be taken for high noise; name a folder that holds it "
                f"as {FILES[LOW]}, and beside it that for high noise, if any, as {FILES[HIGH]}"
            )
        return {HIGH: path}
    if (path / PEFT_FILE).is_file():
        return {HIGH: path / PEFT_FILE}
    there = {network: path / FILES[network] for network in networks}
    there = {network: file for network, file in there.items() if file.is_file()}
    if there:
        return there
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        found = ", ".join(each.name for each in files) or "none"
        raise UserError(
            f"{key}: {path} has to hold one safetensors file, and holds {found}; name the file"
        )
    return {HIGH: files[0]}


class _File:
    """Reads the header of a file, and a few of its numbers."""

    def __init__(self, path: Path) -> None:
        header, self._start = read_header(path)
        self.path = path
        self.metadata: Mapping[str, Any] = header.pop("__metadata__", {})
        self.tensors = header
        for name, entry in header.items():
            is_number = name.endswith(ALPHA) and entry["dtype"] in FORMATS
            if entry["dtype"] not in FLOATS and not is_number:
                raise ValueError(f"holds {name} as {entry['dtype']}; convert it to bfloat16")
        last = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if path.stat().st_size < self._start + last:
            raise ValueError("is broken off; copy or fetch it again")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name]["shape"])

    def data(self, name: str) -> bytes:
        first, last = self.tensors[name]["data_offsets"]
        with self.path.open("rb") as stream:
            stream.seek(self._start + first)
            return stream.read(last - first)

    def number(self, name: str) -> float:
        """Raises ValueError if the tensor is not one number."""
        data, dtype = self.data(name), self.tensors[name]["dtype"]
        if dtype == "BF16":
            data, dtype = b"\0\0" + data, "F32"
        try:
            return float(struct.unpack(f"<{FORMATS[dtype]}", data)[0])
        except struct.error as error:
            raise ValueError(f"has a {name} that is not one number") from error


def _read_file(path: Path, network: str, model: NamedLayers) -> Iterator[_Scaled]:
    file = _File(path)
    stems = _by_stem(file, model)
    alpha_of = _alphas(file)
    ways: dict[str, _Way] = {}
    for stem, names in sorted(stems.items()):
        layers = model.find(stem, network)
        if layers is None:
            raise ValueError(_unknown(stem, model))
        if not {"down", "up"} <= names.keys():
            raise ValueError(f"has only one of the two matrices of {stem}")
        down, up = file.shape(names["down"]), file.shape(names["up"])
        _check_shapes(stem, down, up, [model.shapes[each] for each in layers])
        rank = down[0]
        alpha = file.number(names["alpha"]) if "alpha" in names else alpha_of(stem, rank)
        if not 0 < alpha < math.inf:
            raise ValueError(f"has the alpha {alpha:g} for {stem}; it has to be above 0")
        outputs = [model.shapes[each][0] for each in layers]
        kind = re.sub(r"\d+", "{}", stem)
        if kind not in ways:  # all blocks are made alike; who reads the tensors compares
            ways[kind] = _way(file, names["down"], names["up"], outputs)
        yield from ways[kind].parts(path, names, layers, outputs, rank, alpha)


def _by_stem(file: _File, model: NamedLayers) -> dict[str, dict[Role, str]]:
    """Returns the names of the tensors of each layer by their roles."""
    stems: dict[str, dict[Role, str]] = {}
    for name in file.tensors:
        if TEXT.match(name):
            raise ValueError(
                f"adapts a text encoder ({name}), and only the network is trained; leave those out"
            )
        ending = next((each for each in ENDINGS if name.endswith(each)), None)
        if ending is None:
            raise ValueError(
                f"holds {name}, which is no part of a plain LoRA (A, B and alpha of a layer): "
                "DoRA, LoHa, LoKr, biases and whole weights are not read; convert it"
            )
        stems.setdefault(name.removesuffix(ending), {})[ENDINGS[ending]] = name
    if not stems:
        raise ValueError("holds no tensors")
    return stems


def _unknown(stem: str, model: NamedLayers) -> str:
    return (
        f"adapts {stem}, which is no linear layer of this {model.pipeline}'s network; it was made "
        "for another model"
    )


def _check_shapes(
    stem: str, down: tuple[int, ...], up: tuple[int, ...], layers: Sequence[tuple[int, int]]
) -> None:
    outputs, inputs = sum(each[0] for each in layers), layers[0][1]
    if 0 in down:
        raise ValueError(f"has matrices without numbers for {stem}; make it anew")
    if len(down) != 2 or len(up) != 2 or (up[0], down[1], up[1]) != (outputs, inputs, down[0]):
        raise ValueError(
            f"has {list(up)} x {list(down)} for {stem}, which is a layer of {[outputs, inputs]}; "
            "it was made for another model"
        )


@dataclass(frozen=True, slots=True)
class _Way:
    """Says how a matrix of several layers is cut."""

    apart: bool
    """Whether each layer has ranks of its own."""
    kept: tuple[bool, ...]
    """Which of the layers are adapted."""

    def parts(
        self, file: Path, names: Mapping[Role, str], layers: Sequence[str],
        outputs: Sequence[int], rank: int, alpha: float,
    ) -> Iterator[_Scaled]:  # fmt: skip
        own = rank // len(layers) if self.apart else rank
        row = 0
        for index, (layer, size) in enumerate(zip(layers, outputs, strict=True)):
            first = index * own if self.apart else 0
            if self.kept[index]:
                part = LoraPart(
                    layer, file, names["down"], names["up"], (row, row + size), (first, first + own)
                )
                yield _Scaled(part, own, alpha * own / rank)
            row += size


def _way(file: _File, down: str, up: str, outputs: Sequence[int]) -> _Way:
    number, (rank, inputs) = len(outputs), file.shape(down)
    whole = _Way(apart=False, kept=(True,) * number)
    if number == 1 or rank % number:
        return whole
    own, item = rank // number, len(file.data(down)) // (rank * inputs)
    data, width = memoryview(file.data(up)), rank * item
    filled, row = [], 0
    for index, size in enumerate(outputs):
        first, last = index * own * item, (index + 1) * own * item
        block = False
        for start in range(row * width, (row + size) * width, width):
            if _filled(data[start : start + first]) or _filled(data[start + last : start + width]):
                return whole
            block = block or _filled(data[start + first : start + last])
        filled.append(block)
        row += size
    held = memoryview(file.data(down))
    step = own * inputs * item
    drawn = [_filled(held[index * step : (index + 1) * step]) for index in range(number)]
    return _Way(apart=True, kept=tuple(a or b for a, b in zip(drawn, filled, strict=True)))


def _filled(data: memoryview) -> bool:
    """Says whether a number is not zero."""
    return bool(bytes(data).strip(b"\0"))


def _alphas(file: _File) -> Callable[[str, int], float]:
    """Returns what gives the alpha of a layer that has none of its own in the file, from its name
    and its rank."""
    config = _config(file)
    if config is None:
        return lambda stem, rank: float(rank)
    for key, value in config.items():
        plain = PLAIN.get(key, ())
        if key not in NEUTRAL and value not in (None, False, "none", *plain) and value:
            raise ValueError(
                f"is a LoRA with {key} = {json.dumps(value)}, which is not trained; train a plain "
                "one, or merge it into model.folder"
            )
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}

    def alpha_of(stem: str, rank: int) -> float:
        try:
            own = (a for key, a in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", stem))
            return float(next(own, config.get("lora_alpha", rank)))
        except re.error as error:
            raise ValueError(f"has an alpha_pattern that is none: {error}") from error

    return alpha_of


def _config(file: _File) -> dict[str, Any] | None:
    """Returns peft's configuration, from the file's metadata or from the file beside it."""
    said = file.metadata.get(METADATA_KEY)
    if said is not None:
        plain = _object(METADATA_KEY, said)
        return {
            name.removeprefix(f"{LOW}.").removeprefix(f"{HIGH}."): v for name, v in plain.items()
        }
    beside = file.path.parent / PEFT_CONFIG
    if beside.is_file():
        return _object(PEFT_CONFIG, beside.read_text())
    if any(name.startswith("base_model.model.") for name in file.tensors):
        raise ValueError(f"is peft's, and needs its {PEFT_CONFIG} beside it")
    return None


def _object(what: str, text: str) -> dict[str, Any]:
    found: Any = None
    with contextlib.suppress(ValueError):
        found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"has no JSON object as its {what}; copy or fetch it again")
    return found


def _uniform(path: Path, found: Sequence[_Scaled], model: NamedLayers, key: str) -> LoraFile:
    """Raises UserError unless all layers have one rank and one alpha, and each is there once."""
    ranks = sorted({float(each.rank) for each in found})
    alphas = sorted({each.alpha for each in found})
    for what, values in (("ranks", ranks), ("alphas", alphas)):
        if len(values) > 1:
            some = ", ".join(f"{value:g}" for value in values[:4])
            raise UserError(
                f"{key}: the layers of {path} have different {what} ({some}), and one is trained "
                "for all; resize it to one"
            )
    layers = [each.part.layer for each in found]
    twice = next((each for each in layers if layers.count(each) > 1), None)
    if twice is not None:
        raise UserError(f"{key}: {path} adapts {twice} twice, under two names; leave one out")
    parts = tuple(sorted((each.part for each in found), key=lambda part: part.layer))
    return LoraFile(
        rank=found[0].rank,
        alpha=found[0].alpha,
        parts=parts,
        targets=_suffixes(layers, model),
        experts=_experts(layers, model),
    )


def _experts(layers: Sequence[str], model: NamedLayers) -> Literal["both", "high", "low"]:
    if len(model.networks) == 1:
        return "both"
    sides = [
        side for side, name in EXPERTS.items() if any(e.startswith(f"{name}.") for e in layers)
    ]
    return sides[0] if len(sides) == 1 else "both"


def _suffixes(layers: Sequence[str], model: NamedLayers) -> tuple[str, ...]:
    """Returns names within blocks where they stand for no other layer, else whole names."""
    adapted, found = set(layers), list[str]()
    beginnings = tuple(
        beginning
        for beginning in (prefix_of(network, model.networks) for network in model.networks)
        if any(each.startswith(beginning) for each in layers)
    )
    named: dict[str, list[str]] = {}
    for layer in sorted(adapted):
        named.setdefault(re.sub(r"^.*?\.\d+\.", "", layer), []).append(layer)
    for suffix, those in named.items():
        alike = {each for each in model.shapes if each == suffix or each.endswith(f".{suffix}")}
        others = any(each not in adapted and each.startswith(beginnings) for each in alike)
        found += those if others else [suffix]
    return tuple(found)
