"""Describes what is wrong with a recipe in one line that names the key and the remedy."""

import difflib
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from shared.messages.records import TOKEN_PATTERN, TOKEN_WORDS
from shared.models.hub import ID_PATTERN, REVISION_PATTERN
from shared.recipe.keys import ELSEWHERE, keys_of, nearest
from shared.recipe.rewards import IDENTIFIER

WORDS = {
    TOKEN_PATTERN: TOKEN_WORDS,
    ID_PATTERN: "the owner and the name on the hub, org/name",
    REVISION_PATTERN: "a branch, tag or commit",
    IDENTIFIER: "the name of a Python function",
}
"""What the patterns of values mean."""


def describe(error: ValidationError, recipe: type[BaseModel], plain: Any = None) -> str:
    """Describe the first fault of a ``recipe`` in one line; ``plain`` are its tables as they were
    given, from which tables in a list have their names."""
    faults = error.errors(include_url=False)
    # A misspelt key is the cause of the missing one.
    first = min(faults, key=lambda fault: fault["type"] != "extra_forbidden")
    path, table = _walk(first["loc"], recipe)
    where = ".".join(_by_name(path, plain))
    match first["type"]:
        case "extra_forbidden":
            return f"{where}: unknown key{_remedy(path, table, recipe)}"
        case "missing":
            return f"{where}: missing; it has no default"
        case "value_error":
            reason = str(first["ctx"]["error"])
            return f"{where}.{reason}" if where and "." not in reason.split(":")[0] else reason
        case _:
            # Of a key that takes values of several kinds, every kind has its fault.
            wanted = [_wanted(fault) for fault in faults if _walk(fault["loc"], recipe)[0] == path]
            return f"{where}: {', or '.join(wanted)}, not {first['input']!r}"


def _by_name(path: list[str], plain: Any) -> list[str]:
    """Return the path with the names of tables in place of their numbers in a list."""
    found, named = plain, list[str]()
    for part in path:
        if isinstance(found, list) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
            name = found.get("name") if isinstance(found, Mapping) else None
            named.append(name if isinstance(name, str) and name else part)
        else:
            found = found.get(part) if isinstance(found, Mapping) else None
            named.append(part)
    return named


def _wanted(fault: Any) -> str:
    """Say what a value should have been."""
    if fault["type"] == "string_pattern_mismatch" and fault["ctx"]["pattern"] in WORDS:
        return f"use {WORDS[fault['ctx']['pattern']]}"
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
            table = _table_of(field.annotation)
            if not hasattr(table, "model_fields"):
                break
    return keys, table


def _remedy(path: list[str], table: type[BaseModel], recipe: type[BaseModel]) -> str:
    """Name the nearest key of the table, or else of all tables."""
    known, said = list(table.model_fields), path[-1]
    last = ELSEWHERE.get(said, said)
    close = difflib.get_close_matches(last, known, n=1, cutoff=0.5)
    tables = {key.rpartition(".")[0] for key in keys_of(recipe)}
    inner = [name for name in tables if name.rpartition(".")[2] == said]
    if inner and len(path) == 1:
        meant: str | None = inner[0]
    elif close and (last == said or last in known):
        meant = close[0]
    else:
        meant = nearest(recipe, ".".join(path))
    return f"; did you mean {meant}?" if meant else f"; known are {', '.join(known)}"


def _table_of(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_args(annotation) else annotation
