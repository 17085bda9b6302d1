"""Finds the best of a run's evaluated versions."""

import re
from collections.abc import Iterable

from digenrl.evaluation.records import EvaluationRecord
from shared.recipe.recipe import Recipe
from shared.run.evaluations import worth_of
from shared.run.layout import evaluations_folder
from shared.store import ObjectStore

_RECORD = re.compile(r"/(?P<settings>[0-9a-f]+)/records/(?P<version>\d+)\.json\Z")


def comparable(keys: Iterable[str]) -> list[str]:
    """Return the keys of evaluation records, oldest version first, at those settings at which most
    versions were evaluated: figures of other settings cannot be compared with them."""
    found: dict[str, list[str]] = {}
    for key in keys:
        if (match := _RECORD.search(key)) is not None:
            found.setdefault(match["settings"], []).append(key)
    return sorted(max(found.values(), key=_count, default=()))


def _count(keys: list[str]) -> int:
    return len(keys)


async def ranked_versions(store: ObjectStore, recipe: Recipe) -> list[int]:
    """Return the evaluated versions of a run, the best first, and the older of two equal ones."""
    keys = comparable(await store.keys(evaluations_folder(recipe.run.name)))
    records = [EvaluationRecord.model_validate_json(await store.read(key) or b"") for key in keys]
    return ranked(records, recipe)


def ranked(records: Iterable[EvaluationRecord], recipe: Recipe) -> list[int]:
    """Return the versions of evaluations, the best first, and the older of two equal ones."""
    worths = {each.version: figure_of(each, recipe) for each in records}
    return sorted(worths, key=lambda version: (-worths[version], version))


def figure_of(record: EvaluationRecord, recipe: Recipe) -> float:
    """Return what a version is compared by: what `run.keep_best` goes by as well."""
    weights = {each.name: each.weight for each in recipe.evaluation.scorers}
    worth = worth_of(record.quality, weights)
    return record.quality.reward if worth is None else worth
