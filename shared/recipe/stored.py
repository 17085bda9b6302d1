"""What a recipe meant that was stored by an earlier release: a run keeps what it began with."""

import json
from collections.abc import Mapping
from typing import Any

from shared.recipe.recipe import Recipe


def stored_recipe(data: bytes) -> Recipe:
    """The recipe of a run that this release or an earlier one has stored, as it meant it.

    Raises:
        ValueError: if it is none; pydantic's ValidationError is one.
    """
    return Recipe.model_validate(_settled(data))


def _settled(data: bytes) -> dict[str, Any]:
    """The tables of a stored ``recipe``, under the names of this release, with the values by which
    runs went before there were keys for them, and without keys that did nothing.

    Raises:
        ValueError: if it is no JSON object.
    """
    plain = json.loads(data)
    if not isinstance(plain, dict):
        raise ValueError(f"a recipe has tables; this is a {type(plain).__name__}")
    tables: dict[str, Any] = {
        name: dict(table) if isinstance(table, Mapping) else table for name, table in plain.items()
    }
    algorithm, sampling, trainer = (_of(tables, n) for n in ("algorithm", "sampling", "trainer"))
    for name, field in Recipe.model_fields.items():
        for renamed in getattr(field.annotation, "RENAMED", ()):
            renamed.apply(_of(tables, name))
    algorithm.pop("nft_beta", None)
    sampling.setdefault("roll_back", False)
    if trainer.get("ema") is not None:
        trainer.setdefault("ema_warmup", False)
    return tables


def _of(tables: dict[str, Any], name: str) -> dict[str, Any]:
    table = tables.get(name)
    return table if isinstance(table, dict) else {}
