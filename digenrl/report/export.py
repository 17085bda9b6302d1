"""The trained weights as diffusers takes them: an adapter for ``load_lora_weights``, byte for byte
reproducible, or a whole network for ``from_pretrained``.
"""

import hashlib
import json
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from shared.diffusion.models import DTYPES, load_model
from shared.diffusion.tensors import pack
from shared.diffusion.weights import load_weights
from shared.errors import UserError
from shared.recipe.recipe import Recipe

FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."
"""Of the names of the network's layers."""
FOLDER = "transformer"
"""Of the network, as in the folder of a pipeline, whose own it can replace."""
METADATA_KEY = "lora_adapter_metadata"
"""Where diffusers looks for rank and alpha; without it, it takes alpha for the rank."""


def export_adapter(folder: Path, tensors: dict[str, Tensor], recipe: Recipe) -> str:
    """Write the adapter; returns the file's sha256."""
    config = {
        "r": recipe.model.lora.rank,
        "lora_alpha": recipe.model.lora.alpha,
        "target_modules": sorted({name.split(".lora_")[0] for name in tensors}),
        "lora_dropout": 0.0,
        "bias": "none",
    }
    named = {PREFIX + name: tensor for name, tensor in tensors.items()}
    metadata = {
        "format": "pt",
        METADATA_KEY: json.dumps({PREFIX + key: config[key] for key in sorted(config)}),
    }
    data = with_metadata(pack(named), metadata)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def with_metadata(data: bytes, metadata: dict[str, str]) -> bytes:
    """A safetensors file with metadata in a fixed order: the library's own order changes from
    process to process, and with it the file's digest."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    ordered = {"__metadata__": dict(sorted(metadata.items())), **dict(sorted(header.items()))}
    encoded = json.dumps(ordered, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + data[8 + size :]


def export_network(folder: Path, tensors: dict[str, Tensor], recipe: Recipe) -> str:
    """Write the network; returns the sha256 of its weight files, one after the other."""
    table = recipe.model
    cpu, dtype = torch.device("cpu"), DTYPES[table.dtype]
    model = load_model(table.folder, {"transformer"}, device=cpu, dtype=dtype)
    model.transformer.requires_grad_(True)
    load_weights(model.transformer, tensors)
    target = folder / FOLDER
    model.transformer.save_pretrained(target)  # type: ignore[operator]
    digest = hashlib.sha256()
    for path in weight_files(target):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Large networks are in several."""
    return sorted(folder.glob("*.safetensors"))


def read_network(folder: Path) -> dict[str, Tensor]:
    """What `export_network` has written.

    Raises:
        UserError: if there is none.
    """
    files = weight_files(folder / FOLDER)
    if not files:
        raise UserError(f"--adapter: {folder / FOLDER} holds no safetensors file")
    return {name: tensor for file in files for name, tensor in _read(file).items()}


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """What `export_adapter` has written.

    Raises:
        UserError: if there is none.
    """
    tensors = _read(folder / FILE if folder.is_dir() else folder)
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"--adapter: cannot read {path}: {error}") from error
