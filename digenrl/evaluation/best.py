"""Finds the best of a run's evaluated versions."""

import re
from collections.abc import Iterable

from digenrl.evaluation.records import EvaluationRecord, Quality
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


def worth_of(quality: Quality) -> float:
    """Return what a version is chosen by: its mean gold reward, or without one its reward."""
    gold = [*quality.gold.values()]
    known = [
        each for each in (quality.gold_accuracy, quality.gold_svm_accuracy) if each is not None
    ]
    values = gold or known or [quality.reward]
    return sum(values) / len(values)


def _count(keys: list[str]) -> int:
    return len(keys)


async def ranked_versions(store: ObjectStore, run: str) -> list[int]:
    """Return the evaluated versions of a run, the best first, and the older of two equal ones."""
    keys = comparable(await store.keys(evaluations_folder(run)))
    records = [EvaluationRecord.model_validate_json(await store.read(key) or b"") for key in keys]
    records.sort(key=lambda each: -worth_of(each.quality))
    return [each.version for each in records]
