"""The files and folders that a recipe names, on hosts that keep them in different places.

    recipe file       relative to the recipe, or else to this host's DIGENRL_MODELS
    in memory         absolute, on this host
    stored recipe     as on the scheduler's host, and beside it, under "portable", the name below
                      that host's DIGENRL_MODELS, or below the recipe's own folder

Another host takes the portable name below its own DIGENRL_MODELS. Without that variable, or
without such a name, it takes the path as it is on the scheduler's host.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.recipe.files import PATHS, models_root


def resolved(path: Path, base: Path) -> Path:
    """Return what a recipe in the folder ``base`` means by ``path`` on this host."""
    beside, root = (base / path).resolve(), models_root()
    if root is None or path.is_absolute() or beside.exists():
        return beside
    below = (root / path).resolve()
    return below if below.exists() else beside


def paths_of(tables: Mapping[str, Any]) -> dict[str, str]:
    """Return the path of each key of a recipe's tables, such as `reward.scorers.ocr.folder`."""
    return {label: table[key] for label, table, key in _places(tables)}


def put_paths(tables: Mapping[str, Any], paths: Mapping[str, str]) -> None:
    """Set the paths of these keys."""
    for label, table, key in _places(tables):
        table[key] = paths.get(label, table[key])


def portable_names(tables: Mapping[str, Any], roots: Sequence[Path | None]) -> dict[str, str]:
    """Key -> name below the first of ``roots`` that the path is below; without those that are
    below none."""
    names = {}
    for label, path in paths_of(tables).items():
        below = next((root for root in roots if root and Path(path).is_relative_to(root)), None)
        if below is not None:
            names[label] = Path(path).relative_to(below).as_posix()
    return names


def on_this_host(tables: Mapping[str, Any], portable: Mapping[str, str]) -> None:
    """Set the paths of a stored recipe to where this host has them."""
    root = models_root()
    if root is None:
        return
    found = {label: root / name for label, name in portable.items()}
    stored = paths_of(tables)
    put_paths(
        tables,
        {
            label: str(path)
            for label, path in found.items()
            if path.exists() or not Path(stored.get(label, "")).exists()
        },
    )


def _places(tables: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Return label, table and key of every path that is set."""
    for keys in PATHS:
        yield from _places_of(tables, keys, ())


def _places_of(
    table: Any, keys: tuple[str, ...], label: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, Any], str]]:
    if isinstance(table, list):
        for each in table:
            yield from _places_of(each, keys, (*label, each["name"]))
        return
    key, *rest = keys
    if not isinstance(table, dict) or table.get(key) is None:
        return
    if rest:
        yield from _places_of(table[key], tuple(rest), (*label, key))
    else:
        yield ".".join((*label, key)), table, key
