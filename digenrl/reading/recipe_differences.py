"""Compares recipes key by key."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pydantic_core import to_jsonable_python

from shared.recipe.keys import find_key
from shared.recipe.recipe import Recipe


class RecipeDifference(NamedTuple):
    """A key whose value differs between recipes."""

    key: str
    meaning: str
    """Description of the key; empty if unknown."""
    values: Sequence[tuple[Any, bool]]
    """Value in each recipe as JSON has it, and whether it is the default."""


def flat_values(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a recipe with its dotted key; tables in a list have their own names.

    >>> dict(flat_values({"run": {"steps": 3}, "scorers": [{"name": "ocr", "weight": 1.0}]}))
    {'run.steps': 3, 'scorers.ocr.name': 'ocr', 'scorers.ocr.weight': 1.0}
    """
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from flat_values(each, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        for each in value:
            yield from flat_values(each, f"{name}.{each.get('name')}")
    else:
        yield name, value


def recipe_differences(recipes: Sequence[Recipe]) -> list[RecipeDifference]:
    """Return the keys whose values are not the same in all recipes, without the runs' names."""
    tables = [dict(flat_values(each.model_dump(mode="json"))) for each in recipes]
    rows = {key: [each.get(key) for each in tables] for table in tables for key in table}
    return [
        _difference(key, values) for key, values in rows.items()
        if key != "run.name" and any(each != values[0] for each in values)
    ]  # fmt: skip


def _difference(key: str, values: Sequence[Any]) -> RecipeDifference:
    found = find_key(Recipe, key)
    if found is None:
        return RecipeDifference(key, "", [(each, False) for each in values])
    field, default = found[1].field, ...
    if not field.is_required():
        default = to_jsonable_python(field.get_default(call_default_factory=True))
    meaning = " ".join((field.description or "").split())
    return RecipeDifference(key, meaning, [(each, each == default) for each in values])
