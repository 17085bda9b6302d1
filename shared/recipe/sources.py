"""Where each value of a recipe comes from: a file, an option, the algorithm's name or a default."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from shared.recipe.files import Layer, leaves_of
from shared.recipe.recipe import Recipe, implied_values

Kind = Literal["file", "base", "option", "implied", "default"]


@dataclass(frozen=True, slots=True)
class Value:
    key: str
    """Dotted name; of a table in a list with the table's own name."""
    value: Any
    """Value as JSON has it."""
    kind: Kind
    file: Path | None = None
    """File that says it: the recipe's, or the one that this is based on."""


def values_of(recipe: Recipe, layers: Sequence[Layer], options: Mapping[str, Any]) -> list[Value]:
    """Return every value of a resolved recipe, in the order of its tables."""
    said: dict[str, tuple[Kind, Path | None]] = {}
    for layer in layers:
        kind: Kind = "file" if layer is layers[-1] else "base"
        for key, is_list in leaves_of(layer.tables, ""):
            if is_list:  # taken whole
                said = {old: of for old, of in said.items() if not old.startswith(f"{key}.")}
            said[key] = (kind, layer.path)
    for key in options:
        said[key] = ("option", None)
    implied = {each.key for each in implied_values(recipe)}
    plain = recipe.model_dump(mode="json")
    return [
        Value(key, value, *_source(key, value, said, implied))
        for key, value in _values(recipe, plain, "")
    ]


def _values(table: BaseModel, plain: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name in type(table).model_fields:
        value, key = getattr(table, name), prefix + name
        if isinstance(value, BaseModel):
            yield from _values(value, plain[name], f"{key}.")
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for each, of in zip(value, plain[name], strict=True):
                yield from _values(each, of, f"{key}.{of['name']}.")
        else:
            yield key, plain[name]


def _source(
    key: str, value: Any, said: Mapping[str, tuple[Kind, Path | None]], implied: set[str]
) -> tuple[Kind, Path | None]:
    """Return what says a key; a value of several keys may be set as a whole, or part by part."""
    if value is None and said.get(key, ("", None))[0] != "option":
        return ("default", None)  # TOML has no null: another key took away what a file says
    if key in said:
        return said[key]
    inner = [of for name, of in said.items() if name.startswith(f"{key}.")]
    if inner:
        return inner[-1]
    outer, _, _ = key.rpartition(".")
    while outer:
        if said.get(outer, ("", None))[0] == "option":
            return said[outer]
        outer, _, _ = outer.rpartition(".")
    return ("implied", None) if key in implied else ("default", None)
