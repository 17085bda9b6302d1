"""Every key of a recipe by its dotted name, such as `trainer.learning_rate`, and the nearest key to
an unknown name. Tables in a list are named: `reward.scorers.NAME.weight`."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ANY = "*"
"""Stands for the name of a table in a list."""
NAMES = f"{ANY}.name"
"""Keys with these last names are never suggested."""
MIN_SIMILARITY = 0.6
"""Least likeness, from 0 to 1, of a name and of the key that is meant."""

SYNONYMS: Mapping[str, str] = {
    "cfg": "guidance", "cfg_scale": "guidance", "ema_decay": "ema", "ga": "updates",
    "guidance_scale": "guidance", "max_norm": "max_grad_norm", "max_steps": "steps",
    "mixed_precision": "dtype", "model_id": "id", "num_epochs": "steps",
    "num_generations": "group_size", "num_inference_steps": "steps", "path": "folder",
    "precision": "dtype", "pretrained_model_name_or_path": "id", "r": "rank",
    "target_modules": "targets",
}  # fmt: skip
"""Other trainers' words for the last word of a key here."""


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    """Dotted name, in which `ANY` stands for names of a recipe's own."""
    field: FieldInfo


@cache
def recipe_keys(recipe: type[BaseModel]) -> Mapping[str, Key]:
    """Return every key that has a value, by its name; a list of tables is a key as well."""
    return {key.name: key for key in _keys(recipe, "")}


def _keys(table: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in table.model_fields.items():
        below, in_list = inner_table(field.annotation)
        if below is None or in_list:
            yield Key(prefix + name, field)
        if below is not None:
            yield from _keys(below, f"{prefix}{name}.{f'{ANY}.' if in_list else ''}")
            if not in_list and not field.is_required() and field.default is None:
                yield Key(prefix + name, field)  # a table that may be left out, as a whole


def inner_table(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the table that a field of this type holds, and whether it holds a list of them."""
    kinds = [each for each in get_args(annotation) if each is not type(None)]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    in_list = get_origin(annotation) in (tuple, list)
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind, in_list
    return None, False


def find_key(recipe: type[BaseModel], name: str) -> tuple[tuple[str, ...], Key] | None:
    """Return where a key's value is, and the key; None if ``name`` names none. Dashes may stand
    for underscores.

    >>> from shared.recipe.recipe import Recipe
    >>> find_key(Recipe, "reward.scorers.mine.remote.key-env")[0]
    ('reward', 'scorers', 'mine', 'remote', 'key_env')
    """
    given = name.split(".")
    for key in recipe_keys(recipe).values():
        parts = key.name.split(".")
        if len(parts) == len(given) and all(map(_is_meant, parts, given)):
            pairs = zip(parts, given, strict=True)
            return tuple(own if part == ANY else part for part, own in pairs), key
    return None


def _is_meant(part: str, given: str) -> bool:
    return part == ANY or part == given.replace("-", "_")


def nearest(recipe: type[BaseModel], name: str) -> str | None:
    """Return the key that ``name`` most likely stands for; None if there is nothing like it.

    The last word counts twice, so that a key in the wrong table, or in none, is found; but not by
    a word that several tables have.
    """
    *tables, key_name = name.replace("-", "_").split(".")
    table, last = ".".join(tables), SYNONYMS.get(key_name, key_name)
    keys = [key.name for key in recipe_keys(recipe).values()]
    full_keys = [key for key in keys if not key.endswith(NAMES)]
    is_common = sum(key.rpartition(".")[2] == last for key in full_keys) > 1

    def likeness(key: str) -> float:
        *tables_of_key, own = key.split(".")
        same = _likeness(last, own)
        if not table:
            return same
        if is_common and own == last:
            return _likeness(table, ".".join(tables_of_key[: len(tables)]))
        return (2 * same + _likeness(table, ".".join(tables_of_key))) / 3

    best = max(full_keys, key=likeness)
    return best.replace(ANY, "NAME") if likeness(best) >= MIN_SIMILARITY else None


def _likeness(given: str, candidate: str) -> float:
    """Return how alike two words are, from 0 to 1; initials, as in lr, are nearly the word."""
    initials = "".join(word[0] for word in candidate.split("_"))
    if given == initials and len(given) > 1:
        return 0.95
    whole = difflib.SequenceMatcher(None, given, candidate).ratio()
    if len(given) > 1 and given in candidate.split("_"):
        return max(whole, 0.75)
    return whole
