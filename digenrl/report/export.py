"""Exports trained weights for diffusers, and reads them again.

An adapter is for ``load_lora_weights``, and its bytes are reproducible; a whole network is for
``from_pretrained``. A model with two networks has a file, or a folder, of each: diffusers loads
them one by one, and both files have the names that the first network's layers have.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from shared.diffusion.experts import networks_of
from shared.diffusion.models import load_model
from shared.diffusion.tensors import pack
from shared.diffusion.weights import load_weights
from shared.errors import UserError
from shared.models.catalogue import network_folders
from shared.models.families import EXPERTS
from shared.recipe.recipe import Recipe

HIGH, LOW = EXPERTS.values()
FILES = {HIGH: "pytorch_lora_weights.safetensors", LOW: "pytorch_lora_weights_2.safetensors"}
"""Files of the networks' adapters; the only network has the first."""
PREFIX = "transformer."
"""Prefix of the names of a network's layers, in either file."""
METADATA_KEY = "lora_adapter_metadata"
"""Key under which diffusers finds rank and alpha; without it, diffusers assumes alpha = rank."""


def export_adapter(folder: Path, tensors: dict[str, Tensor], recipe: Recipe) -> str:
    """Write the adapter and return the sha256 of its concatenated files."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    for network in FILES:
        own = _of_network(tensors, network, networks_in(recipe.model.folder))
        if own:
            data = _adapter_file(own, recipe)
            (folder / FILES[network]).write_bytes(data)
            digest.update(data)
    return digest.hexdigest()


def networks_in(folder: Path) -> list[str]:
    """Return the names of the folders of a model's networks: of the only one, or of two."""
    return [each.name for each in network_folders(folder)]


def _of_network(
    tensors: dict[str, Tensor], network: str, networks: Sequence[str]
) -> dict[str, Tensor]:
    """Return one network's tensors by the names that they have within it."""
    if network not in networks:
        return {}
    prefix = _prefix(network, networks)
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _prefix(network: str, networks: Sequence[str]) -> str:
    """Return how the names of a network's parameters begin in this project."""
    return f"{network}." if len(networks) > 1 else ""


def _adapter_file(tensors: dict[str, Tensor], recipe: Recipe) -> bytes:
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
    return with_metadata(pack(named), metadata)


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
    """Write the networks to folders that are named as in a pipeline's folder, where they can
    replace the originals; return the sha256 of all concatenated weight files."""
    table = recipe.model
    cpu, dtype = torch.device("cpu"), getattr(torch, table.dtype)
    model = load_model(table.folder, {"transformer"}, device=cpu, dtype=dtype)
    model.transformer.requires_grad_(True)
    load_weights(model.transformer, tensors)
    digest = hashlib.sha256()
    for name, network in networks_of(model.transformer).items():
        network.save_pretrained(folder / name)  # type: ignore[operator]
        for path in weight_files(folder / name):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """List the weight files: a large network has several."""
    return sorted(folder.glob("*.safetensors"))


def read_network(folder: Path, networks: Sequence[str]) -> dict[str, Tensor]:
    """Read what `export_network` has written of a model with these networks.

    Raises:
        UserError: if there is no network.
    """
    found: dict[str, Tensor] = {}
    for network in networks:
        files, prefix = weight_files(folder / network), _prefix(network, networks)
        if not files:
            raise UserError(f"--adapter: {folder / network} holds no safetensors file")
        found |= {prefix + name: each for file in files for name, each in _read(file).items()}
    return found


def read_adapter(folder: Path, networks: Sequence[str]) -> dict[str, Tensor]:
    """Read what `export_adapter` has written of a model with these networks; of two, either may
    have no adapter. A file is that of the first.

    Raises:
        UserError: if there is no adapter.
    """
    files = {each: folder / FILES[each] for each in networks} if folder.is_dir() else {HIGH: folder}
    there = {network: file for network, file in files.items() if file.exists()}
    return {
        _prefix(network, networks) + name.removeprefix(PREFIX): tensor
        for network, file in (there or {HIGH: files[HIGH]}).items()
        for name, tensor in _read(file).items()
    }


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"--adapter: cannot read {path}: {error}") from error
