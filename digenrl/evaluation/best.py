"""Finds the best of a run's evaluated versions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from digenrl.evaluation.records import FIGURES, EvaluationRecord
from shared.recipe.recipe import Recipe
from shared.run.evaluations import EvaluationFigures, gold_figure, worth_of
from shared.run.layout import named_objects
from shared.store import ObjectStore

BEST_RULE = "versions that are not evaluated do not count, and of equal ones the older is the best"
"""How the best version is chosen, in words."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best of a run's evaluated versions, and what makes it the best."""

    version: int
    figures: Mapping[int, float]
    """The figure by which each evaluated version is compared."""
    measure: str
    """Name of the figures."""
    rule: str = BEST_RULE

    @property
    def is_untrained(self) -> bool:
        """Whether no evaluated version is better than the model before training."""
        return self.version == 0

    @property
    def trained(self) -> int | None:
        """The best of the versions that were trained, of equal ones the older; None if none is
        evaluated."""
        trained = [version for version in self.figures if version]
        return min(trained, key=lambda each: (-self.figures[each], each), default=None)


async def best_version(store: ObjectStore, recipe: Recipe) -> Best | None:
    """Return the best of a run's versions; None if none is evaluated."""
    return find_best(await _records(store, recipe), recipe)


def find_best(records: Iterable[EvaluationRecord], recipe: Recipe) -> Best | None:
    """Return the best of the comparable evaluated versions; None without any."""
    all_records = list(records)
    if not all_records:
        return None
    figures = {each.version: comparison_figure(each, recipe) for each in all_records}
    return Best(
        ranked(all_records, recipe)[0],
        figures,
        comparison_name(all_records[-1].quality, _weights(recipe)),
    )


def comparison_name(quality: EvaluationFigures, weights: Mapping[str, float]) -> str:
    """Name what ``worth_of`` makes of an evaluation."""
    if gold_figure(quality, weights) is None:
        return FIGURES["reward"]
    if not quality.gold:
        return FIGURES["gold_accuracy"]
    parts = [(weights.get(name, 1.0), name) for name in quality.gold]
    if len(parts) == 1 and parts[0][0] == 1:
        return f"gold reward {parts[0][1]}"
    return "gold reward " + " + ".join(f"{weight:g} x {name}" for weight, name in parts)


async def comparable(store: ObjectStore, run: str) -> list[str]:
    """Return the keys of evaluation records, oldest version first, at those settings at which most
    versions were evaluated: figures of other settings cannot be compared with them."""
    keys_by_settings: dict[str, list[str]] = {}
    for key, name in (await named_objects(store, run, "evaluations")).items():
        if name["settings"] is not None:
            keys_by_settings.setdefault(name["settings"], []).append(key)
    return sorted(max(keys_by_settings.values(), key=len, default=()))


async def ranked_versions(store: ObjectStore, recipe: Recipe) -> list[int]:
    """Return the evaluated versions of a run, the best first, and the older of two equal ones."""
    return ranked(await _records(store, recipe), recipe)


async def _records(store: ObjectStore, recipe: Recipe) -> list[EvaluationRecord]:
    keys = await comparable(store, recipe.run.name)
    records = [await EvaluationRecord.read(store, key) for key in keys]
    return [each for each in records if each is not None]


def ranked(records: Iterable[EvaluationRecord], recipe: Recipe) -> list[int]:
    """Return the versions of evaluations, the best first, and the older of two equal ones."""
    worths = {each.version: comparison_figure(each, recipe) for each in records}
    return sorted(worths, key=lambda version: (-worths[version], version))


def comparison_figure(record: EvaluationRecord, recipe: Recipe) -> float:
    """Return what a version is compared by: what `run.keep_best` goes by as well."""
    worth = worth_of(record.quality, _weights(recipe))
    return record.quality.reward if worth is None else worth


def _weights(recipe: Recipe) -> dict[str, float]:
    return {each.name: each.weight for each in recipe.evaluation.scorers}
