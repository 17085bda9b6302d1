"""The configurations that models are published with: for a trace where no model folder is.

Each folder of `PUBLISHED` is laid out as the model's repository, and named as the recipes' folder;
it has the files that say what the model is, and no weights.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import UserError

PUBLISHED = Path(__file__).parent / "published"


@dataclass(frozen=True, slots=True)
class Configuration:
    """Names where a model's configuration files are."""

    folder: Path
    is_published: bool
    """Whether they are those of this package, because the recipe's folder is not here."""


def configuration_of(folder: Path, name: str | None = None) -> Configuration:
    """Finds the configuration of the model in ``folder``, or the published one of that name.

    Args:
        name: name of the model, by default the folder's.

    Raises:
        UserError: if there is neither.
    """
    if (folder / "model_index.json").is_file():
        return Configuration(folder, False)
    known = sorted((each.name for each in PUBLISHED.iterdir() if each.is_dir()), key=len)
    for each in reversed(known):
        if _plain(each) in _plain(name or folder.name):
            return Configuration(PUBLISHED / each, True)
    raise UserError(
        f"model.folder: {folder} has no model_index.json, and no published configuration has its "
        f"name; known are {', '.join(sorted(known))}. The JSON files of the model's repository are "
        "enough for a trace"
    )


def published(model: str, part: str) -> Mapping[str, Any]:
    """Returns the published configuration of one part of a model, such as ``transformer``."""
    plain: dict[str, Any] = json.loads((PUBLISHED / model / part / "config.json").read_text())
    return {key: value for key, value in plain.items() if not key.startswith("_")}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
