"""Exports trained weights for diffusers and others, and reads them again.

An adapter is for ``load_lora_weights`` or what else reads its layout, and its bytes are
reproducible; a whole network is for ``from_pretrained``. A model with two networks has a file, or
a folder, of each: diffusers loads them one by one, and both files have the names that the first
network's layers have.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from digenrl.report.layouts import Layout, adapter_files
from shared.diffusion.loading.experts import named_networks
from shared.diffusion.loading.models import load_model
from shared.diffusion.weights.starting_adapter import lora_tensors
from shared.diffusion.weights.trained_weights import load_weights
from shared.errors import UserError
from shared.models.catalogue import network_folders
from shared.models.lora_files import FILES, read_lora
from shared.models.lora_names import network_prefix
from shared.recipe.recipe import Recipe

OPTION = "--adapter"


def export_adapter(
    folder: Path, tensors: dict[str, Tensor], recipe: Recipe, layout: Layout = Layout.diffusers
) -> str:
    """Write the adapter and return the sha256 of its concatenated files.

    Raises:
        UserError: if the layout cannot name what is adapted.
    """
    networks = networks_in(recipe.model.folder)
    files: dict[str, bytes] = {}
    for network in FILES:
        own = _network_tensors(tensors, network, networks)
        if own:
            files |= adapter_files(own, recipe, network, layout)
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    for name, data in files.items():
        (folder / name).write_bytes(data)
        digest.update(data)
    return digest.hexdigest()


def networks_in(folder: Path) -> list[str]:
    """Return the names of the folders of a model's networks: of the only one, or of two."""
    return [each.name for each in network_folders(folder)]


def _network_tensors(
    tensors: dict[str, Tensor], network: str, networks: Sequence[str]
) -> dict[str, Tensor]:
    """Return one network's tensors by the names that they have within it."""
    if network not in networks:
        return {}
    prefix = network_prefix(network, networks)
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def export_network(folder: Path, tensors: dict[str, Tensor], recipe: Recipe) -> str:
    """Write the networks to folders that are named as in a pipeline's folder, where they can
    replace the originals; return the sha256 of all concatenated weight files."""
    table = recipe.model
    cpu, dtype = torch.device("cpu"), getattr(torch, table.dtype)
    model = load_model(table.folder, {"transformer"}, device=cpu, dtype=dtype)
    model.transformer.requires_grad_(True)
    load_weights(model.transformer, tensors)
    digest = hashlib.sha256()
    for name, network in named_networks(model.transformer).items():
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
    tensors: dict[str, Tensor] = {}
    for network in networks:
        files, prefix = weight_files(folder / network), network_prefix(network, networks)
        if not files:
            raise UserError(f"--adapter: {folder / network} holds no safetensors file")
        tensors |= {prefix + name: each for file in files for name, each in _read(file).items()}
    return tensors


def read_adapter(path: Path, recipe: Recipe) -> tuple[dict[str, Tensor], Recipe]:
    """Read an adapter of the recipe's model, in any layout; of two networks, either may have none.
    Return its tensors, and the recipe with its rank and alpha.

    Raises:
        UserError: if the file does not exist.
    """
    lora = read_lora(path, recipe.model.folder, OPTION)
    table = recipe.model.lora.model_copy(update={"rank": lora.rank, "alpha": lora.alpha})
    model = recipe.model.model_copy(update={"lora": table})
    return lora_tensors(lora, OPTION), recipe.model_copy(update={"model": model})


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"--adapter: cannot read {path}: {error}") from error
