"""Models of the Hugging Face hub on this host: where they are, and which files of them a run reads.

    DIGENRL_MODELS/models--ORG--NAME/snapshots/COMMIT    `digenrl fetch`, where that variable is
        set
    DIGENRL_MODELS/ORG/NAME                              put there by hand; for no revision
    HF_HOME/hub/models--ORG--NAME/snapshots/COMMIT       `digenrl fetch`, and all of Hugging
        Face's

The layout follows huggingface_hub's cache: `refs/REVISION` holds the commit of a branch or tag.
Nothing is downloaded here.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.models.families import EXPERTS
from shared.models.plugins import family_named
from shared.models.refused import unsupported

ROOT = "DIGENRL_MODELS"
MAIN = "main"
"""Revision of a model for which none is named."""
INDEX = "model_index.json"
REQUIRED_PARTS = frozenset({"transformer", "scheduler", "vae"})
"""Parts of every model."""
WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx",
    ".onnx_data", ".ot", ".pkl", ".tflite", ".xml",
)  # fmt: skip
"""Suffixes of files of weights. A pipeline may be loaded from any other file of its parts, such as
a chat template."""
ID_PATTERN = r"^[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}$"
REVISION_PATTERN = r"^[A-Za-z0-9][\w./-]{0,199}$"
_PREFIX = "models--"
_COMMIT_LENGTH = 40


def models_root() -> Path | None:
    """Return the folder that the variable names; None if it is not set."""
    root = os.environ.get(ROOT, "")
    return Path(root).resolve() if root else None


def hub_cache() -> Path:
    """Return the folder in which Hugging Face's libraries keep models."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(os.environ.get("HF_HOME") or f"{cache}/huggingface") / "hub"


def target() -> Path:
    """Return the cache that a model is fetched to."""
    return models_root() or hub_cache()


def storage(cache: Path, name: str, prefix: str = _PREFIX) -> Path:
    """Return the folder of a repository in a cache; of a model, if no other prefix is given."""
    return cache / f"{prefix}{name.replace('/', '--')}"


def commit_at(storage: Path, revision: str) -> str | None:
    """Return the commit that a branch or tag was at when it was fetched; None if it was not."""
    return _ref(storage / "refs" / revision)


def place(model: str, revision: str | None) -> Path:
    """Return the folder of a model on this host; if it is not here, the one where it would be."""
    wanted = revision or MAIN
    for cache in dict.fromkeys((target(), hub_cache())):
        folder = storage(cache, model)
        commit = commit_at(folder, wanted) or wanted
        if (folder / "snapshots" / commit / INDEX).is_file():
            return folder / "snapshots" / commit
    root = models_root()
    if root is not None and revision is None and (root / model / INDEX).is_file():
        return root / model
    return storage(target(), model) / "snapshots" / wanted


def _ref(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def cached_commit(folder: Path) -> str | None:
    """Return the commit of a folder of a cache; None for any other."""
    is_commit = folder.parent.name == "snapshots" and len(folder.name) == _COMMIT_LENGTH
    return folder.name if is_commit else None


def how_to_fetch(folder: Path) -> str | None:
    """Return the command that fetches the model of a cache's folder; None for any other folder."""
    name = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not name.startswith(_PREFIX):
        return None
    revision = "" if folder.name == MAIN else f" --revision {folder.name}"
    return f"digenrl fetch {name.removeprefix(_PREFIX).replace('--', '/')}{revision}"


def missing(folder: Path, what: str = "") -> str | None:
    """Report that a model of the hub, or a file of it, is not on this host, and how to get it; None
    for a folder that is in no cache."""
    command = how_to_fetch(folder)
    if command is None:
        return None
    model = command.split()[2]
    fault = f"lacks {what}" if what else "is not"
    return f"model.id: {model} {fault} on this host; fetch it with: {command}"


def needed_parts(index: Mapping[str, Any]) -> list[str]:
    """Return the folders of a model that a run reads, from its model_index.json.

    Raises:
        UserError: if the model's family has no adapter.
    """
    pipeline = str(index.get("_class_name"))
    family = family_named(pipeline)
    if family is None:
        raise UserError(f"model.id: it is {unsupported(pipeline)}")
    known_parts = (
        REQUIRED_PARTS | family.components | ({EXPERTS["low"]} if family.has_experts else set())
    )
    return [
        name
        for name, entry in index.items()
        if name in known_parts and isinstance(entry, list) and all(entry)
    ]


def files_in_part(names: Sequence[str], part: str) -> list[str]:
    """Return the names of the files in a part's folder, without the folder."""
    return [name.removeprefix(f"{part}/") for name in names if name.startswith(f"{part}/")]
