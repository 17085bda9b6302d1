"""Where each value of a recipe comes from: a file, an option, the algorithm's name or a default."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from shared.recipe.files import RecipeLayer, iterate_leaves
from shared.recipe.recipe import Recipe, implied_values

SourceKind = Literal["file", "base", "option", "implied", "default"]


@dataclass(frozen=True, slots=True)
class SourcedValue:
    key: str
    """Dotted name; of a table in a list with the table's own name."""
    value: Any
    """Value as JSON has it."""
    kind: SourceKind
    file: Path | None = None
    """File that sets it: the recipe's, or its base."""


def sourced_values(
    recipe: Recipe, layers: Sequence[RecipeLayer], options: Mapping[str, Any]
) -> list[SourcedValue]:
    """Return every value of a resolved recipe, in the order of its tables."""
    sources: dict[str, tuple[SourceKind, Path | None]] = {}
    for layer in layers:
        kind: SourceKind = "file" if layer is layers[-1] else "base"
        for key, is_list in iterate_leaves(layer.tables, ""):
            if is_list:  # taken whole
                sources = {
                    old: source for old, source in sources.items() if not old.startswith(f"{key}.")
                }
            sources[key] = (kind, layer.path)
    for key in options:
        sources[key] = ("option", None)
    implied = {each.key for each in implied_values(recipe)}
    plain = recipe.model_dump(mode="json")
    return [
        SourcedValue(key, value, *_source(key, value, sources, implied))
        for key, value in _values(recipe, plain, "")
    ]


def _values(table: BaseModel, plain: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name in type(table).model_fields:
        value, key = getattr(table, name), prefix + name
        if isinstance(value, BaseModel):
            yield from _values(value, plain[name], f"{key}.")
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for each, entry in zip(value, plain[name], strict=True):
                yield from _values(each, entry, f"{key}.{entry['name']}.")
        else:
            yield key, plain[name]


def _source(
    key: str, value: Any, sources: Mapping[str, tuple[SourceKind, Path | None]], implied: set[str]
) -> tuple[SourceKind, Path | None]:
    """Return the source of a key; a value of several keys may be set as a whole, or part by
    part."""
    if value is None and sources.get(key, ("", None))[0] != "option":
        return ("default", None)  # TOML has no null: another key took away what a file says
    if key in sources:
        return sources[key]
    inner = [source for name, source in sources.items() if name.startswith(f"{key}.")]
    if inner:
        return inner[-1]
    outer, _, _ = key.rpartition(".")
    while outer:
        if sources.get(outer, ("", None))[0] == "option":
            return sources[outer]
        outer, _, _ = outer.rpartition(".")
    return ("implied", None) if key in implied else ("default", None)
