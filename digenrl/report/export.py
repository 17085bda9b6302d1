"""The trained adapter as diffusers' ``load_lora_weights`` takes it, byte for byte reproducible."""

import hashlib
import json
from pathlib import Path

from torch import Tensor

from shared.diffusion.tensors import pack
from shared.recipe.recipe import Recipe

FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."
"""Of the names of the network's layers."""
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
