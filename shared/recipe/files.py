"""The tables of a recipe file: TOML, or the JSON of a resolved recipe, over those of its base."""

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import UserError

BASE = "base"
"""Key of a file, relative to this one, whose tables are taken where this one says nothing."""

MAX_BASES = 8

PATHS = (
    ("model", "folder"),
    ("data", "prompts"),
    ("evaluation", "prompts"),
    ("evaluation", "digits"),
    ("reward", "scorers", "folder"),
    ("reward", "scorers", "judge", "key_file"),
    ("evaluation", "scorers", "folder"),
    ("evaluation", "scorers", "judge", "key_file"),
)
"""Keys that name a file or a folder, relative to the recipe that they stand in."""


def read_tables(path: Path, depth: int = 0) -> dict[str, Any]:
    """Read the tables of a recipe file; raise UserError, one line that names the file."""
    plain = _read(path)
    base = plain.pop(BASE, None)
    if base is None:
        return plain
    if not isinstance(base, str):
        raise UserError(f"{path}: base: the name of a file, not {base!r}")
    if depth == MAX_BASES:
        raise UserError(f"{path}: base: {MAX_BASES} files are based on one another; is it a ring?")
    below = read_tables(path.parent / base, depth + 1)
    for keys in PATHS:
        _put_below(below, keys, Path(base).parent, path.parent)
    return _over(below, plain)


def _put_below(table: Any, keys: tuple[str, ...], folder: Path, beside: Path) -> None:
    """The path that ``keys`` lead to, relative to ``folder``, as one relative to ``beside``, which
    ``folder`` is relative to. What only the host's folder of models has stays as it is, and what
    is no path is left for the recipe's own checks."""
    key, *rest = keys
    if isinstance(table, list):
        for each in table:
            _put_below(each, keys, folder, beside)
    elif isinstance(table, dict) and key in table:
        if rest:
            _put_below(table[key], tuple(rest), folder, beside)
        elif isinstance(table[key], str):
            below, root = folder / table[key], models_root()
            if (beside / below).exists() or not (root and (root / table[key]).exists()):
                table[key] = str(below)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        plain: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise UserError(f"cannot read the recipe {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not {path.suffix[1:].upper() or 'TOML'}: {error}") from error
    if not isinstance(plain, dict):
        raise UserError(f"{path}: a recipe has tables; this is a {type(plain).__name__}")
    return plain


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge table by table and key by key; a list is taken whole."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _over(old, value)
        else:
            merged[key] = value
    return merged


ROOT = "DIGENRL_MODELS"


def models_root() -> Path | None:
    """Return the folder that the variable names; None if it is not set."""
    root = os.environ.get(ROOT, "")
    return Path(root).resolve() if root else None
