"""The configurations that models are published with: for a trace of a model that is not on this
host, and to find the cost profile of a model by the shape of its network.

Each folder of `PUBLISHED` has the layout of the model's repository, and the name of the recipes'
folder; it has the files that describe the model, and no weights.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.models.catalogue import PartConfig, boundary, find_family

PUBLISHED = Path(__file__).parent / "published"
ALIASES: Mapping[str, str] = {
    "stable-diffusion-3.5-medium": "sd35-medium",
    "stable-diffusion-3.5-large": "sd35-large",
    "FLUX.1-schnell": "flux1-dev",
    "FLUX.2-klein-4B": "flux2-klein-base-4b",
    "Wan2.1-T2V-1.3B": "wan2.1-1.3b",
    "Wan2.1-T2V-14B": "wan2.1-14b",
    "Wan2.2-T2V-A14B": "wan2.2-a14b",
}
"""Other names on the hub, or their beginnings, of models with a published configuration."""
SHAPE_KEYS = (
    "_class_name", "num_layers", "num_single_layers", "n_layers", "dual_attention_layers", "dim",
    "num_attention_heads", "n_heads", "attention_head_dim", "ffn_dim", "joint_attention_dim",
    "text_dim", "text_embed_dim", "cap_feat_dim", "cross_attention_dim", "image_dim",
)  # fmt: skip
"""Keys of a network's configuration that decide what it costs."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Names where a model's configuration files are."""

    folder: Path
    is_published: bool
    """Whether they come from this package, because the recipe's folder is missing here."""


def find_configuration(folder: Path, name: str | None = None) -> Configuration:
    """Finds the configuration of the model in ``folder``, or the published one of that name.

    Args:
        name: name of the model, by default the folder's.

    Raises:
        UserError: if there is neither.
    """
    if (folder / "model_index.json").is_file():
        return Configuration(folder, False)
    folders = sorted(each.name for each in PUBLISHED.iterdir() if each.is_dir())
    names = {**{each: each for each in folders}, **ALIASES}
    for each in sorted(names, key=len, reverse=True):
        if _plain(each) in _plain(name or folder.name):
            return Configuration(PUBLISHED / names[each], True)
    raise UserError(
        f"model.folder: {folder} has no model_index.json, and no published configuration has its "
        f"name; known are {', '.join(folders)}. The JSON files of the model's repository are "
        "enough for a trace"
    )


def alike(folder: Path, names: Iterable[str]) -> str:
    """Returns which of these published models has a network of the same shape as the model in
    ``folder``, if possible of the same pipeline; empty if no model has.

    Raises:
        UserError: if the folder is not a model of a known family.
    """
    shape, pipeline = _shape(folder), find_family(folder).pipeline
    same = [
        name for name in names if (PUBLISHED / name).is_dir() and _shape(PUBLISHED / name) == shape
    ]
    return min(
        same, key=lambda name: find_family(PUBLISHED / name).pipeline != pipeline, default=""
    )


def _shape(folder: Path) -> tuple[object, ...]:
    network = PartConfig(folder / "transformer" / "config.json")
    return (boundary(folder) is None, *(network.get(key) or None for key in SHAPE_KEYS))


def published(model: str, part: str) -> Mapping[str, Any]:
    """Returns the published configuration of one part of a model, such as ``transformer``."""
    plain: dict[str, Any] = json.loads((PUBLISHED / model / part / "config.json").read_text())
    return {key: value for key, value in plain.items() if not key.startswith("_")}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
