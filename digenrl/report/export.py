"""Exports trained weights for diffusers, and reads them again.

An adapter is for ``load_lora_weights``, and its bytes are reproducible; a whole network is for
``from_pretrained``.
"""

import hashlib
import json
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from shared.diffusion.models import load_model
from shared.diffusion.tensors import pack
from shared.diffusion.weights import load_weights
from shared.errors import UserError
from shared.recipe.recipe import Recipe

FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."
"""Prefix of the names of the network's layers."""
FOLDER = "transformer"
"""Folder of the network, named as in a pipeline's folder, where it can replace the original."""
METADATA_KEY = "lora_adapter_metadata"
"""Key under which diffusers finds rank and alpha; without it, diffusers assumes alpha = rank."""


def export_adapter(folder: Path, tensors: dict[str, Tensor], recipe: Recipe) -> str:
    """Write the adapter and return the sha256 of its file."""
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
    """Add metadata in a fixed order to a safetensors file. The library's own order, and with it the
    digest of the file, differs between processes."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    ordered = {"__metadata__": dict(sorted(metadata.items())), **dict(sorted(header.items()))}
    encoded = json.dumps(ordered, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + data[8 + size :]


def export_network(folder: Path, tensors: dict[str, Tensor], recipe: Recipe) -> str:
    """Write the network and return the sha256 of its concatenated weight files."""
    table = recipe.model
    cpu, dtype = torch.device("cpu"), getattr(torch, table.dtype)
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
    """List the weight files: a large network has several."""
    return sorted(folder.glob("*.safetensors"))


def read_network(folder: Path) -> dict[str, Tensor]:
    """Read what `export_network` has written.

    Raises:
        UserError: if there is no network.
    """
    files = weight_files(folder / FOLDER)
    if not files:
        raise UserError(f"--adapter: {folder / FOLDER} holds no safetensors file")
    return {name: tensor for file in files for name, tensor in _read(file).items()}


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Read what `export_adapter` has written.

    Raises:
        UserError: if there is no adapter.
    """
    tensors = _read(folder / FILE if folder.is_dir() else folder)
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"--adapter: cannot read {path}: {error}") from error
