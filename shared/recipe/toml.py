"""Recipes as TOML text: a value on one line, and a file in which each key has its meaning."""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from shared.recipe.keys import ANY, Key, recipe_keys

WIDTH = 98


def toml_value(value: Any) -> str:
    """Return a value as TOML has it; a table on one line, without keys that have no value."""
    if isinstance(value, Mapping):
        inner = (f"{key} = {toml_value(each)}" for key, each in value.items() if each is not None)
        return f"{{ {', '.join(inner)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def explained_toml(tables: Mapping[str, Any], recipe: type[BaseModel]) -> Iterator[str]:
    """Yield the lines of a recipe's file; above each key is the first sentence of its meaning,
    and what its value means."""
    keys = recipe_keys(recipe)
    for name in sorted(tables, key=list(recipe.model_fields).index):
        yield from _table(f"[{name}]", name, tables[name], keys)


def _table(
    header: str, label: str, table: Mapping[str, Any], keys: Mapping[str, Key]
) -> Iterator[str]:
    """``label``: the table's name among the keys, in which `ANY` stands for a name in a list."""
    order = {name: number for number, name in enumerate(keys)}
    inner = list[tuple[str, str, Mapping[str, Any]]]()
    yield from ("", header)
    for name in sorted(table, key=lambda name: order.get(f"{label}.{name}", len(order))):
        value, key, below = table[name], f"{label}.{name}", f"{header.strip('[]')}.{name}"
        if isinstance(value, Mapping):
            inner.append((f"[{below}]", key, value))
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            inner += [(f"[[{below}]]", f"{key}.{ANY}", each) for each in value]
        else:
            yield from _meaning(keys[key], value)
            yield f"{name} = {toml_value(value)}"
    for each in inner:
        yield from _table(*each, keys)


def _meaning(key: Key, value: Any) -> list[str]:
    text = " ".join((key.field.description or "").split())
    of_value = re.search(rf"`{re.escape(str(value))}`: [^;]*?(?=[;.]( |$))", text)
    first = text.partition(". ")[0].rstrip(".")
    if of_value and of_value[0] not in first:
        first = of_value[0] if first.startswith("`") else f"{first}. {of_value[0]}"
    return textwrap.wrap(first, WIDTH, initial_indent="# ", subsequent_indent="# ")
