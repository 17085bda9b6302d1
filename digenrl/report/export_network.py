"""All weights of a trained network, as diffusers' ``from_pretrained`` takes them."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from shared.diffusion.models import DTYPES, load_model
from shared.diffusion.weights import load_weights
from shared.recipe.recipe import Recipe

FOLDER = "transformer"
"""As in the folder of a pipeline, whose own it can replace."""


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
