"""A recipe's keys as options of the command line: what a text stands for, by the key's type.

A text is what the key takes of it, as pydantic reads texts (`8`, `1e-4`, `true`, a name), or else
as TOML or JSON writes values (`[1.0, 0.5, 0.0]`, `{temperature = 0}`), or else, for a list, its
items with commas. `none` takes away the value of a key that may be without one.
"""

import contextlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from shared.errors import UserError
from shared.recipe.files import resolved, without_excluded
from shared.recipe.keys import Key, find_key, nearest
from shared.recipe.rewards import ScorerTable

NONE = "none"


def read_options(
    recipe: type[BaseModel], texts: Iterable[tuple[str, str | None]], folder: Path
) -> dict[str, Any]:
    """Return the values of options, ``("trainer.learning_rate", "1e-4")``, by the keys' own names.
    The last of several for one key counts. Without a text, a key that is true or false is true.

    Args:
        folder: the folder that relative paths of options begin at.

    Raises:
        UserError: if no key has that name, or it needs a value.
    """
    values = {}
    for name, text in texts:
        path, key = find_option_key(recipe, name)
        if text is None and not is_switch(key):
            raise UserError(f"--{name}: needs a value")
        values[".".join(path)] = True if text is None else _value(key, text, folder)
    return values


def is_switch(key: Key) -> bool:
    """Whether a key is true or false, and true where its option stands alone."""
    return key.field.annotation is bool


def find_option_key(recipe: type[BaseModel], name: str) -> tuple[tuple[str, ...], Key]:
    """Return where an option's value belongs, and its key.

    Raises:
        UserError: if no key has that name; names the nearest.
    """
    key = find_key(recipe, name)
    if key is None:
        meant = nearest(recipe, name)
        remedy = f"did you mean --{meant}?" if meant else "`digenrl recipe keys` lists the keys"
        raise UserError(f"--{name}: no key of a recipe; {remedy}")
    return key


def _value(key: Key, text: str, folder: Path) -> Any:
    """Return the first reading of the text that the key takes; if it takes none, the text, which
    the recipe's own checks describe."""
    form: Any = Annotated[key.field.annotation, key.name, *key.field.metadata]
    kind: TypeAdapter[Any] = TypeAdapter(form)
    for reading in _readings(text):
        try:
            value = kind.validate_python(reading)
        except ValidationError:
            continue
        return kind.dump_python(_absolute(value, folder), mode="json", exclude_unset=True)
    return text


def _absolute(value: Any, folder: Path) -> Any:
    if isinstance(value, Path):
        return resolved(value, folder)
    if isinstance(value, tuple):
        return tuple(each.at(folder) if isinstance(each, ScorerTable) else each for each in value)
    return value


def _readings(text: str) -> Iterator[Any]:
    if text == NONE:
        yield None
    yield text
    with contextlib.suppress(ValueError):
        yield tomllib.loads(f"value = {text}")["value"]
    with contextlib.suppress(ValueError):
        yield json.loads(text)
    yield [part.strip() for part in text.split(",") if part.strip()]


def put_options(tables: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tables`` with the values of options over theirs, as tables of their own: a table in
    a list is changed in a list of its own, under the name that it has in ``tables``.

    Raises:
        UserError: if a list has no table of the name that an option names.
    """
    changed: Any = dict(tables)
    for parts in sorted((name.split(".") for name in options), key=_turn):
        changed = _put(changed, parts, options[".".join(parts)], "", options)
    return changed  # type: ignore[no-any-return]


def _turn(parts: list[str]) -> tuple[bool, int]:
    """Put tables before their keys, and new names of tables after all."""
    return parts[-1] == "name", len(parts)


def _put(tables: Any, parts: list[str], value: Any, label: str, options: Mapping[str, Any]) -> Any:
    """Leave what is no table as it is, for the recipe's own checks to describe."""
    part, *rest = parts
    if isinstance(tables, list):
        names = [each.get("name") if isinstance(each, dict) else None for each in tables]
        if part not in names:
            part_names = ", ".join(str(name) for name in names)
            raise UserError(f"--{label}.{part}: {label} has no {part}; it has {part_names}")
        at = names.index(part)
        changed = _put(tables[at], rest, value, f"{label}.{part}", options)
        return [*tables[:at], changed, *tables[at + 1 :]]
    if not isinstance(tables, Mapping):
        return tables
    name = f"{label}.{part}".lstrip(".")
    left = without_excluded(label.rpartition(".")[2], tables, {part})
    typed = {
        key: {} if isinstance(entries, Mapping) else entries  # of a table, only what options say
        for key, entries in tables.items()
        if key not in left and _is_given(f"{label}.{key}", options)
    }
    tables = {**left, **typed}
    if not rest:
        return {**tables, part: value}
    if tables.get(part) is None and _is_list(name):
        raise UserError(f"--{name}.{rest[0]}: {name} has no {rest[0]}; it is empty")
    inner = tables.get(part)
    return {**tables, part: _put({} if inner is None else inner, rest, value, name, options)}


def _is_given(name: str, options: Mapping[str, Any]) -> bool:
    """Return whether an option sets a key, or one in its table."""
    return any(each == name or each.startswith(f"{name}.") for each in options)


def _is_list(label: str) -> bool:
    return label.endswith(".scorers")
