"""The tables of a recipe file, TOML or the JSON of a resolved recipe, over the tables of its base;
and the files and folders in them, on hosts with different locations.

    recipe file       relative to the recipe, or else to this host's DIGENRL_MODELS
    in memory         absolute, on this host
    stored recipe     as on the scheduler's host, and under "portable" the name below that host's
        DIGENRL_MODELS, or below the recipe's own folder

Another host takes the portable name below its own DIGENRL_MODELS. Without that variable, or without
such a name, it takes the path as it is on the scheduler's host.
"""

import difflib
import json
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import UserError, not_utf8
from shared.limits import MAX_BASES
from shared.models.hub import models_root, place

BASE = "base"
"""Key of a file, relative to this one, whose tables are defaults for this one."""

SHIPPED = Path(__file__).resolve().parents[2] / "recipes"
"""Folder of the recipes that come with DigenRL."""

PATHS = (
    ("model", "folder"),
    ("model", "adapter"),
    ("data", "prompts"),
    ("data", "dataset", "folder"),
    ("evaluation", "prompts"),
    ("evaluation", "dataset", "folder"),
    ("evaluation", "digits"),
    ("reward", "scorers", "folder"),
    ("reward", "scorers", "source"),
    ("reward", "scorers", "judge", "key_file"),
    ("reward", "scorers", "remote", "key_file"),
    ("evaluation", "scorers", "folder"),
    ("evaluation", "scorers", "source"),
    ("evaluation", "scorers", "judge", "key_file"),
    ("evaluation", "scorers", "remote", "key_file"),
)
"""Keys that name a file or a folder, relative to the recipe that they stand in."""


EXCLUDES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "model": {"folder": ("id", "revision"), "id": ("folder", "revision"), "adapter": ("lora",)},
    "data": {"prompts": ("dataset",), "dataset": ("prompts",)},
    "evaluation": {"prompts": ("dataset",), "dataset": ("prompts",)},
    "dataset": {"id": ("folder", "revision"), "folder": ("id", "revision", "config")},
    "judge": {"key_env": ("key_file",), "key_file": ("key_env",)},
    "remote": {"key_env": ("key_file",), "key_file": ("key_env",)},
}
"""Mutually exclusive keys, by the table's name and the other key: a file that sets one removes them
from its base, and an option removes them from the file."""

PROMPTS = ("data.prompts", "data.dataset", "data.dataset.id", "data.dataset.folder")
PROMPT_KEYS = ("prompts", "dataset", "held_out")
"""Keys of `evaluation` that belong to the prompts of their own file: where a file or an option
replaces those, the evaluation would show other prompts than the ones that are trained."""

HOME = "~"
"""Home folder of the current user, at the beginning of a path."""
YAML = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class RecipeLayer:
    """Tables of a recipe that stand in one file."""

    path: Path
    tables: dict[str, Any]


def located(path: Path) -> Path:
    """Return a recipe's file; if it does not exist, the recipe of that name that comes with
    DigenRL."""
    shipped = SHIPPED / f"{path.name.removesuffix('.toml')}.toml"
    return shipped if not path.exists() and shipped.is_file() else path


def read_layers(path: Path, depth: int = 0) -> list[RecipeLayer]:
    """Read a recipe file and those that it is based on, its own tables last.

    Raises:
        UserError: one line that names the file.
    """
    plain = _read(path)
    base = plain.pop(BASE, None)
    if base is None:
        return [RecipeLayer(path, plain)]
    if not isinstance(base, str):
        raise UserError(f"{path}: base: the name of a file, not {base!r}")
    if depth == MAX_BASES:
        raise UserError(f"{path}: base: {MAX_BASES} files are based on one another; is it a ring?")
    file = located(path.parent / base)
    if not file.is_file():
        raise UserError(f"{path}: base: there is no file {file}{_nearest(file)}")
    below = read_layers(file, depth + 1)
    folder = Path(base).parent if file == path.parent / base else file.parent
    for layer in below:
        _put_below(layer.tables, folder, path.parent)
    return [*below, RecipeLayer(path, plain)]


def merged(layers: Sequence[RecipeLayer]) -> dict[str, Any]:
    """Return the tables of all layers, each over those before it."""
    tables: dict[str, Any] = {}
    for layer in layers:
        own = [key for key, _ in iterate_leaves(layer.tables, "")]
        tables = _over(without_evaluated(tables, own), layer.tables)
    return tables


def without_evaluated(tables: Mapping[str, Any], above: Collection[str]) -> dict[str, Any]:
    """Return tables without the prompts of their evaluation if the keys ``above``, dotted, replace
    the prompts of training."""
    table = tables.get("evaluation")
    if not isinstance(table, Mapping) or not set(PROMPTS).intersection(above):
        return dict(tables)
    left = {key: value for key, value in table.items() if key not in PROMPT_KEYS}
    return {**tables, "evaluation": left}


def iterate_leaves(tables: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, bool]]:
    """Yield the name of each key that is set, and whether it is a list of tables."""
    for name, value in tables.items():
        key = prefix + name
        if isinstance(value, Mapping):
            yield from iterate_leaves(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            yield key, True
            for each in value:
                yield from iterate_leaves(each, f"{key}.{each.get('name')}.")
        else:
            yield key, False


def check_excluded(tables: Mapping[str, Any]) -> None:
    """Raises UserError if a recipe names a model, or its prompts, in two ways."""
    for table, one, other in (
        ("model", "folder", "id"),
        ("data", "prompts", "dataset"),
        ("evaluation", "prompts", "dataset"),
    ):
        given = tables.get(table)
        if isinstance(given, Mapping) and {one, other} <= given.keys():
            raise UserError(f"{table}.{one}, {table}.{other}: set one of the two, not both")


def _put_below(tables: Any, folder: Path, base_folder: Path) -> None:
    """Makes paths that are relative to ``folder`` relative to ``base_folder``, which ``folder`` is
    relative to. A path that only the host's folder of models has stays unchanged, and a value that
    is no path is left for the recipe's own checks."""
    for _, table, key in _places(tables):
        if isinstance(table[key], str) and not table[key].startswith(f"{HOME}/"):
            below, root = folder / table[key], models_root()
            if _is_there(base_folder / below, key) or not (
                root and _is_there(root / table[key], key)
            ):
                table[key] = str(below)


def _is_there(path: Path, key: str) -> bool:
    """Return whether the file exists; a recipe may name a function after it."""
    file = path.with_name(path.name.rpartition(":")[0] or path.name) if key == "source" else path
    return file.exists()


def _read(path: Path) -> dict[str, Any]:
    if path.suffix.lower() in YAML:
        raise UserError(f"{path}: YAML is not read; write the recipe as TOML (docs/recipes.md)")
    try:
        text = path.read_text(encoding="utf-8-sig")
        plain: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        reason = f"{error.strerror}{_nearest(path)}"
        raise UserError(f"cannot read the recipe {path}: {reason}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is no text in UTF-8 ({not_utf8(path)}); save it so") from error
    except ValueError as error:
        remedy = "; put a text in quotes" if "Invalid value" in str(error) else ""
        fault = f"not {path.suffix[1:].upper() or 'TOML'}: {error}{remedy}"
        raise UserError(f"{path}: {fault}") from error
    if not isinstance(plain, dict):
        raise UserError(f"{path}: a recipe has tables; this is a {type(plain).__name__}")
    return plain


def _nearest(path: Path) -> str:
    names = [each.name for folder in (path.parent, SHIPPED) for each in folder.glob("*.toml")]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {near[0]}?" if near else "; correct its name"


def _over(below: Mapping[str, Any], above: Mapping[str, Any], table: str = "") -> dict[str, Any]:
    """Merge table by table and key by key; a list is taken whole."""
    tables = without_excluded(table, below, above.keys())
    for key, value in above.items():
        old = tables.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            tables[key] = _over(old, value, key)
        else:
            tables[key] = value
    return tables


def without_excluded(
    table: str, below: Mapping[str, Any], above: Collection[str]
) -> dict[str, Any]:
    """Return the rest of a table below the keys ``above``."""
    excluded = {key for given in above for key in EXCLUDES.get(table, {}).get(given, ())}
    return {key: value for key, value in below.items() if key not in excluded}


def resolved(path: Path, base: Path) -> Path:
    """Return what a recipe in the folder ``base`` means by ``path`` on this host."""
    path_in_folder, root = (base / path).resolve(), models_root()
    if path.parts[:1] == (HOME,) and not path_in_folder.exists():
        return path.expanduser().resolve()
    if root is None or path.is_absolute() or path_in_folder.exists():
        return path_in_folder
    below = (root / path).resolve()
    return below if below.exists() else path_in_folder


def key_paths(tables: Mapping[str, Any]) -> dict[str, str]:
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
    for label, path in key_paths(tables).items():
        below = next((root for root in roots if root and Path(path).is_relative_to(root)), None)
        if below is not None:
            names[label] = Path(path).relative_to(below).as_posix()
    return names


def on_this_host(tables: Mapping[str, Any], portable: Mapping[str, str]) -> None:
    """Set the paths of a stored recipe to where this host has them."""
    _put_portable(tables, portable)
    model = tables["model"]
    if model.get("id") is not None:
        model["folder"] = str(place(model["id"], model.get("revision")))


def _put_portable(tables: Mapping[str, Any], portable: Mapping[str, str]) -> None:
    root = models_root()
    if root is None:
        return
    paths = {label: root / name for label, name in portable.items()}
    stored = key_paths(tables)
    put_paths(
        tables,
        {
            label: str(path)
            for label, path in paths.items()
            if path.exists() or not Path(stored.get(label, "")).exists()
        },
    )


def _places(tables: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Return label, table and key of every path that is set."""
    for keys in PATHS:
        yield from _key_places(tables, keys, ())


def _key_places(
    table: Any, keys: tuple[str, ...], label: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, Any], str]]:
    if isinstance(table, list):
        for each in table:
            name = each.get("name") if isinstance(each, dict) else None
            yield from _key_places(each, keys, (*label, str(name)))
        return
    key, *rest = keys
    if not isinstance(table, dict) or table.get(key) is None:
        return
    if rest:
        yield from _key_places(table[key], tuple(rest), (*label, key))
    else:
        yield ".".join((*label, key)), table, key
