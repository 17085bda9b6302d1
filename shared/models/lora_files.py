"""Reads from a LoRA file, without torch, which layers of a model's network it adapts, and how.

The key names of diffusers, peft, Kohya's trainers and ComfyUI are known. A matrix that stands for
several layers of diffusers' network is cut into theirs: where it is made of blocks of its own for
each (zeros elsewhere), each layer gets its block; otherwise all share the rows of A.
"""

import re
import shlex
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared.errors import UserError
from shared.models.catalogue import network_folders
from shared.models.families import EXPERTS
from shared.models.lora_header import FLOAT8_TYPES, PEFT_FILE, LoraHeader
from shared.models.lora_names import HIGH, LOW, NamedLayers, converted_name, network_prefix

FILES = {HIGH: "pytorch_lora_weights.safetensors", LOW: "pytorch_lora_weights_2.safetensors"}
"""Files of the networks' adapters in diffusers' layout; the only network has the first."""
KEY = "model.adapter"


@dataclass(frozen=True, slots=True)
class LoraPart:
    """Location of one layer's matrices."""

    layer: str
    """Name in the network; for two networks, with the folder's name in front."""
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
    """Suffixes of the names of the layers, as few as identify them."""
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
    model = NamedLayers.from_folder(folder, networks)
    scaled, faults = list[_ScaledPart](), list[str]()
    for network, file in lora_paths(path, networks, key).items():
        try:
            header = LoraHeader(file)
            faults += _faults(header, network, model)
            scaled += _read_file(header, network, model)
        except (ValueError, KeyError, TypeError, struct.error) as error:
            reason = error.args[0] if isinstance(error, ValueError) else f"cannot be read: {error}"
            raise UserError(f"{key}: {file} {reason}") from error
        except UserError as error:  # of a header
            raise UserError(str(error).replace("model.folder", key, 1)) from error
    return _uniform(path, scaled, faults, model, key)


@dataclass(frozen=True, slots=True)
class _ScaledPart:
    part: LoraPart
    rank: int
    alpha: float
    stored_rank: int
    """Rank of the matrix in the file, which may be of several layers."""


def lora_paths(path: Path, networks: Sequence[str], key: str) -> dict[str, Path]:
    """Returns the file of each network that has one; raises UserError if none can be found."""
    if not path.exists():
        raise UserError(f"{key}: {path} does not exist; name a safetensors file, or its folder")
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UserError(f"{key}: {path} is no safetensors file, and no other is read")
        if LOW in networks and "low" in path.stem.lower():
            raise UserError(
                f"{key}: {path} alone would be taken for high noise; name a folder that holds it "
                f"as {FILES[LOW]}, together with the file for high noise, if any, as {FILES[HIGH]}"
            )
        return {HIGH: path}
    if (path / PEFT_FILE).is_file():
        return {HIGH: path / PEFT_FILE}
    paths = {network: path / FILES[network] for network in networks}
    paths = {network: file for network, file in paths.items() if file.is_file()}
    if paths:
        return paths
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        names = ", ".join(each.name for each in files) or "none"
        raise UserError(
            f"{key}: {path} has to hold one safetensors file, and holds {names}; name the file"
        )
    return {HIGH: files[0]}


def _faults(file: LoraHeader, network: str, model: NamedLayers) -> Iterator[str]:
    """Yields what `digenrl adapter convert` can change."""
    if file.text:
        yield f"{file.path} adapts a text encoder ({file.text[0]}), and only the network is trained"
    narrow = next((n for n, entry in file.tensors.items() if entry["dtype"] in FLOAT8_TYPES), None)
    if narrow is not None:
        yield f"{file.path} holds {narrow} in 8 bits"
    other = next((each for each in file.stems if model.find(each, network) is None), None)
    if other is not None:
        yield f"{file.path} names layers as only DiffSynth does ({other})"


def _read_file(file: LoraHeader, network: str, model: NamedLayers) -> Iterator[_ScaledPart]:
    ways: dict[str, _LayerCut] = {}
    for stem in file.stems:
        layers = model.find(stem, network) or model.find(converted_name(stem), network)
        if layers is None:
            raise ValueError(
                f"adapts {stem}, which is no linear layer of this {model.pipeline}'s network; it "
                "was made for another model"
            )
        down, up = file.shapes(stem)
        outputs, inputs = [model.shapes[each][0] for each in layers], model.shapes[layers[0]][1]
        if (up[0], down[1]) != (sum(outputs), inputs):
            raise ValueError(
                f"has {list(up)} x {list(down)} for {stem}, which is a layer of "
                f"{[sum(outputs), inputs]}; it was made for another model"
            )
        kind = re.sub(r"\d+", "{}", stem)
        if kind not in ways:  # all blocks are made alike; who reads the tensors compares
            ways[kind] = _way(file, stem, outputs)
        yield from ways[kind].parts(file, stem, layers, outputs)


@dataclass(frozen=True, slots=True)
class _LayerCut:
    """How a matrix of several layers is cut."""

    apart: bool
    """Whether each layer has ranks of its own."""
    kept: tuple[bool, ...]
    """Which of the layers are adapted."""

    def parts(
        self, file: LoraHeader, stem: str, layers: Sequence[str], outputs: Sequence[int]
    ) -> Iterator[_ScaledPart]:
        names, rank, alpha = file.stems[stem], file.shapes(stem)[0][0], file.alpha(stem)
        own = rank // len(layers) if self.apart else rank
        row = 0
        for index, (layer, size) in enumerate(zip(layers, outputs, strict=True)):
            first = index * own if self.apart else 0
            if self.kept[index]:
                rows, ranks = (row, row + size), (first, first + own)
                part = LoraPart(layer, file.path, names["down"], names["up"], rows, ranks)
                yield _ScaledPart(part, own, alpha * own / rank, rank)
            row += size


def _way(file: LoraHeader, stem: str, outputs: Sequence[int]) -> _LayerCut:
    names, number, ((rank, inputs), _) = file.stems[stem], len(outputs), file.shapes(stem)
    whole = _LayerCut(apart=False, kept=(True,) * number)
    if number == 1 or rank % number:
        return whole
    down, data = memoryview(file.data(names["down"])), memoryview(file.data(names["up"]))
    own, item = rank // number, len(down) // (rank * inputs)
    width = rank * item
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
    step = own * inputs * item
    drawn = [_filled(down[index * step : (index + 1) * step]) for index in range(number)]
    return _LayerCut(apart=True, kept=tuple(a or b for a, b in zip(drawn, filled, strict=True)))


def _filled(data: memoryview) -> bool:
    """Whether a number is not zero."""
    return bool(bytes(data).strip(b"\0"))


def _uniform(
    path: Path, scaled: Sequence[_ScaledPart], faults: list[str], model: NamedLayers, key: str
) -> LoraFile:
    """Raises UserError if there are faults, or if layers differ in rank or alpha, with the command
    that helps; and if a layer is there twice."""
    alphas, ranks = sorted({each.alpha for each in scaled}), sorted({each.rank for each in scaled})
    for what, values in (("ranks", ranks), ("alphas", alphas)):
        if len(values) > 1:
            some = ", ".join(f"{value:g}" for value in values[:4])
            faults.append(
                f"the layers of {path} have different {what} ({some}), and one is trained for all"
            )
    if faults:
        is_one = len({(each.rank, each.alpha, each.stored_rank) for each in scaled}) == 1
        rank = [] if is_one else ["--rank", str(max(each.stored_rank for each in scaled))]
        drop = ["--drop", "text-encoder"] if any("text encoder" in each for each in faults) else []
        raise UserError(f"{key}: {'; '.join(faults)}; {remedy(path, *rank, *drop)}")
    layers = [each.part.layer for each in scaled]
    twice = next((each for each in layers if layers.count(each) > 1), None)
    if twice is not None:
        raise UserError(f"{key}: {path} adapts {twice} twice, under two names; leave one out")
    parts = tuple(sorted((each.part for each in scaled), key=lambda part: part.layer))
    return LoraFile(
        rank=scaled[0].rank,
        alpha=scaled[0].alpha,
        parts=parts,
        targets=_suffixes(layers, model),
        experts=_experts(layers, model),
    )


def remedy(path: Path, *options: str) -> str:
    """Returns the command that converts a LoRA into one that can be trained."""
    is_folder = path.is_dir() and (path / FILES[LOW]).is_file()
    name = path.stem if path.is_file() else path.absolute().name
    out = path.absolute().parent / f"{name}-converted{'' if is_folder else '.safetensors'}"
    command = shlex.join(["digenrl", "adapter", "convert", str(path), str(out), *options])
    return f"make one that can be trained: {command}"


def _experts(layers: Sequence[str], model: NamedLayers) -> Literal["both", "high", "low"]:
    if len(model.networks) == 1:
        return "both"
    sides = [
        side for side, name in EXPERTS.items() if any(e.startswith(f"{name}.") for e in layers)
    ]
    return sides[0] if len(sides) == 1 else "both"


def _suffixes(layers: Sequence[str], model: NamedLayers) -> tuple[str, ...]:
    """Returns names within blocks where they stand for no other layer, else whole names."""
    adapted, suffixes = set(layers), list[str]()
    beginnings = tuple(
        beginning
        for beginning in (network_prefix(network, model.networks) for network in model.networks)
        if any(each.startswith(beginning) for each in layers)
    )
    named: dict[str, list[str]] = {}
    for layer in sorted(adapted):
        named.setdefault(re.sub(r"^.*?\.\d+\.", "", layer), []).append(layer)
    for suffix, those in named.items():
        alike = {each for each in model.shapes if each == suffix or each.endswith(f".{suffix}")}
        others = any(each not in adapted and each.startswith(beginnings) for each in alike)
        suffixes += those if others else [suffix]
    return tuple(suffixes)
