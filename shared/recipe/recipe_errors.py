"""Describes what is wrong with a recipe, in lines that name the key and the remedy."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from shared.messages.records import TOKEN_PATTERN, TOKEN_WORDS
from shared.models.hub import ID_PATTERN, REVISION_PATTERN
from shared.recipe.keys import SYNONYMS, nearest, recipe_keys
from shared.recipe.rewards import IDENTIFIER

PATTERN_TEXTS = {
    TOKEN_PATTERN: TOKEN_WORDS,
    ID_PATTERN: "the owner and the name on the hub, org/name",
    REVISION_PATTERN: "a branch, tag or commit",
    IDENTIFIER: "the name of a Python function",
}
"""Meanings of the patterns of values."""


def describe(error: ValidationError, recipe: type[BaseModel], plain: Any = None) -> list[str]:
    """Describe every fault of a ``recipe``, in one line each; ``plain`` are its tables as they were
    given, from which tables in a list have their names."""
    faults = error.errors(include_url=False)
    messages: dict[str, str] = {}
    paths = [_walk(each["loc"], recipe)[0] for each in faults]
    # A misspelt key is the cause of the missing one.
    for fault in sorted(faults, key=lambda each: each["type"] != "extra_forbidden"):
        path, table = _walk(fault["loc"], recipe)
        if any(other[: len(path)] == path != other for other in paths):
            continue  # a list of tables is at fault because one of them is
        where = ".".join(_by_name(path, plain))
        if where in messages and fault["type"] != "value_error":
            continue
        match fault["type"]:
            case "extra_forbidden":
                messages[where] = f"{where}: unknown key{_remedy(path, table, recipe)}"
            case "missing":
                messages |= _missing(where, table, list(messages.values()))
            case "value_error":
                for reason in str(fault["ctx"]["error"]).splitlines():
                    inside = where and "." not in reason.split(":")[0]
                    messages[reason] = f"{where}.{reason}" if inside else reason
            case _:
                # Of a key that takes values of several kinds, every kind has its fault.
                same = [each for each in faults if _walk(each["loc"], recipe)[0] == path]
                wanted = ", or ".join(_wanted(each) for each in same)
                messages[where] = f"{where}: {wanted}, not {fault['input']!r}"
    return list(messages.values())


def _missing(where: str, table: Any, messages: Sequence[str]) -> dict[str, str]:
    """Return a line for a missing key, or for each key that a missing table needs; none for a key
    that another line takes a misspelt one for."""
    fields = getattr(table, "model_fields", {})
    if any(line.endswith(f"did you mean {where.rpartition('.')[2]}?") for line in messages):
        return {}
    keys = [f"{where}.{name}" for name, each in fields.items() if each.is_required()]
    return {key: f"{key}: missing; it has no default" for key in keys or [where]}


def _by_name(path: list[str], plain: Any) -> list[str]:
    """Return the path with the names of tables in place of their numbers in a list."""
    field, named = plain, list[str]()
    for part in path:
        if isinstance(field, list) and part.isdigit() and int(part) < len(field):
            field = field[int(part)]
            name = field.get("name") if isinstance(field, Mapping) else None
            named.append(name if isinstance(name, str) and name else part)
        else:
            field = field.get(part) if isinstance(field, Mapping) else None
            named.append(part)
    return named


def _wanted(fault: Any) -> str:
    """Describe the valid values."""
    if fault["type"] == "string_pattern_mismatch" and fault["ctx"]["pattern"] in PATTERN_TEXTS:
        return f"use {PATTERN_TEXTS[fault['ctx']['pattern']]}"
    if fault["type"] == "tuple_type":
        is_table = isinstance(fault["input"], Mapping)
        return f"write [[{'.'.join(map(str, fault['loc']))}]]" if is_table else "write a list"
    message: str = fault["msg"]
    return message[0].lower() + message[1:]


def _walk(location: tuple[int | str, ...], recipe: type[BaseModel]) -> tuple[list[str], Any]:
    """Return the path of keys without what pydantic adds for alternatives of one key, and the table
    that it ends in, or the type of the value that it ends at."""
    keys: list[str] = []
    table: Any = recipe
    for part in location:
        keys.append(str(part))
        if isinstance(part, str):
            field = getattr(table, "model_fields", {}).get(part)
            if field is None:
                break
            table = next(iter(get_args(field.annotation)), field.annotation)
            if not hasattr(table, "model_fields"):
                break
    return keys, table


def _remedy(path: list[str], table: type[BaseModel], recipe: type[BaseModel]) -> str:
    """Name the nearest key of the table, or else of all tables."""
    names, key_name = list(table.model_fields), path[-1]
    last = SYNONYMS.get(key_name, key_name)
    close = difflib.get_close_matches(last, names, n=1, cutoff=0.5)
    tables = {key.rpartition(".")[0] for key in recipe_keys(recipe)}
    inner = [name for name in tables if name.rpartition(".")[2] == key_name]
    if inner and len(path) == 1:
        meant: str | None = inner[0]
    elif close and (last == key_name or last in names):
        meant = close[0]
    else:
        meant = nearest(recipe, ".".join(path))
    return f"; did you mean {meant}?" if meant else f"; known are {', '.join(names)}"
