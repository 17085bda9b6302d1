"""The layouts in which an adapter is written: the names of its tensors, and where alpha stands.

    diffusers   names of diffusers' network; rank and alpha in the file's metadata
    peft        the same names, next to a configuration of peft's
    comfyui     names of the published checkpoint; alpha is a tensor of each layer
    kohya       the same names with underscores, as Kohya's trainers write them

If the published checkpoint has one layer for several of diffusers', its matrices consist of a block
for each, and of zeros: its rank and alpha are multiplied accordingly.
"""

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.diffusion.sampling.tensors import pack
from shared.errors import UserError
from shared.models.catalogue import check_family
from shared.models.lora_files import FILES
from shared.models.lora_header import METADATA_KEY, PEFT_CONFIG, PEFT_FILE
from shared.models.lora_names import HIGH, native_names, network_prefix
from shared.models.memory import layer_shapes
from shared.recipe.recipe import Recipe

PREFIX = f"{HIGH}."
"""Prefix of the names of a network's layers in diffusers' layout, in the file of either network."""


class Layout(StrEnum):
    diffusers = "diffusers"
    peft = "peft"
    comfyui = "comfyui"
    kohya = "kohya"


def adapter_files(
    tensors: Mapping[str, Tensor], recipe: Recipe, network: str, layout: Layout
) -> dict[str, bytes]:
    """Return the files of one network's adapter by their names.

    Args:
        tensors: A (rank, inputs) and B (outputs, rank) of each layer, by their names in the
            network.

    Raises:
        UserError: if the layout has no name for a layer or for a second network.
    """
    config = _config(tensors, recipe)
    match layout:
        case Layout.diffusers:
            metadata = json.dumps({PREFIX + key: config[key] for key in sorted(config)})
            named = {PREFIX + name: tensor for name, tensor in tensors.items()}
            return {FILES[network]: _file(named, {METADATA_KEY: metadata})}
        case Layout.peft:
            if network != HIGH:
                raise UserError(
                    "--layout: peft's files hold one network, and the adapter has two; "
                    "choose diffusers, comfyui or kohya"
                )
            named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
            peft_config = {"peft_type": "LORA", "init_lora_weights": True, **config}
            return {
                PEFT_FILE: _file(named, {}),
                PEFT_CONFIG: json.dumps(peft_config, indent=2, sort_keys=True).encode() + b"\n",
            }
        case Layout.comfyui | Layout.kohya:
            named = dict(_native(tensors, recipe, network, layout))
            return {FILES[network]: _file(named, {})}


def _config(tensors: Mapping[str, Tensor], recipe: Recipe) -> dict[str, Any]:
    return {
        "r": recipe.model.lora.rank,
        "lora_alpha": recipe.model.lora.alpha,
        "target_modules": sorted({name.split(".lora_")[0] for name in tensors}),
        "lora_dropout": 0.0,
        "bias": "none",
    }


def _native(
    tensors: Mapping[str, Tensor], recipe: Recipe, network: str, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by the names of the published checkpoint, and an alpha for each layer.

    Raises:
        UserError: if it has no layer of that name.
    """
    folder, table = recipe.model.folder, recipe.model.lora
    left = {name.split(".lora_")[0] for name in tensors}
    for name, parts in _named(folder, network).items():
        if not left.intersection(parts):
            continue
        left.difference_update(parts)
        down, up = _joined(tensors, parts, _shapes(folder, network))
        alpha = torch.tensor(table.alpha * len(parts), dtype=down.dtype)
        if layout is Layout.kohya:
            stem = "lora_unet_" + name.replace(".", "_")
            yield f"{stem}.lora_down.weight", down
            yield f"{stem}.lora_up.weight", up
        else:
            stem = f"diffusion_model.{name}"
            yield f"{stem}.lora_A.weight", down
            yield f"{stem}.lora_B.weight", up
        yield f"{stem}.alpha", alpha
    if left:
        raise UserError(
            f"--layout: the published checkpoint has no layer that is {min(left)} alone; choose "
            "diffusers or peft"
        )


def _named(folder: Path, network: str) -> dict[str, tuple[str, ...]]:
    """Return the layers of a network that each name of the published checkpoint stands for; of two
    names of a layer, the one to write is first."""
    native = check_family(folder).native_layers
    names = native_names(_shapes(folder, network), native)
    if not native:
        return names
    return {name: each for name, each in names.items() if each != (name,) or name in native}


def _shapes(folder: Path, network: str) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of a network's layers by their names in it."""
    shapes = layer_shapes(folder)
    if not any(name.startswith(f"{network}.") for name in shapes):
        return shapes
    prefix = network_prefix(network, list(FILES))
    return {
        name.removeprefix(prefix): shape
        for name, shape in shapes.items()
        if name.startswith(prefix)
    }


def _joined(
    tensors: Mapping[str, Tensor], parts: tuple[str, ...], shapes: Mapping[str, tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Return A (n rank, inputs) and B (all outputs, n rank) of n layers as one."""
    if len(parts) == 1:
        [layer] = parts
        return tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"]
    some = next(tensors[n] for n in (f"{part}.lora_A.weight" for part in parts) if n in tensors)
    rank = len(some)
    downs, ups = [], []
    for part in parts:
        outputs, inputs = shapes[part]
        downs.append(tensors.get(f"{part}.lora_A.weight", some.new_zeros(rank, inputs)))
        ups.append(tensors.get(f"{part}.lora_B.weight", some.new_zeros(outputs, rank)))
    return torch.cat(downs), torch.block_diag(*ups)


def _file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    return with_metadata(pack(dict(tensors)), {"format": "pt", **metadata})


def with_metadata(data: bytes, metadata: Mapping[str, str]) -> bytes:
    """Add metadata in a fixed order to a safetensors file. The library's own order, and with it the
    digest of the file, differs between processes."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    ordered = {"__metadata__": dict(sorted(metadata.items())), **dict(sorted(header.items()))}
    encoded = json.dumps(ordered, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + data[8 + size :]
