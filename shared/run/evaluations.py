"""Quality of versions, from evaluations: by rewards that are not part of the training reward.

The gold figure of a version is the weighted sum of its gold rewards (`evaluation.scorers`), as the
training reward is one of the training rewards; without any, the accuracy of the held-out digit
judge (`evaluation.digits`). Versions are compared by it, and by the mean training reward where
nothing else was measured.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import structlog
from pydantic import BaseModel, FiniteFloat, ValidationError

from shared.run.layout import named_objects
from shared.store import ObjectStore

log = structlog.get_logger()


class _Quality(BaseModel):
    gold: dict[str, FiniteFloat] = {}
    gold_accuracy: FiniteFloat | None = None
    reward: FiniteFloat | None = None


class _Record(BaseModel):
    quality: _Quality


def reached(figures: Iterable[Mapping[int, float]], goal: float) -> int | None:
    """Return the first version that reaches ``goal`` together with the version evaluated before
    it, at the same settings; None if no version does. A single high figure may be luck."""
    versions = [
        version
        for each in figures
        for before, version in pairwise(sorted(each))
        if min(each[before], each[version]) >= goal
    ]
    return min(versions, default=None)


class EvaluationFigures(Protocol):
    """Figures of an evaluation by which versions are compared."""

    @property
    def gold(self) -> Mapping[str, float]: ...
    @property
    def gold_accuracy(self) -> float | None: ...
    @property
    def reward(self) -> float | None: ...


def gold_figure(quality: EvaluationFigures, weights: Mapping[str, float]) -> float | None:
    """Return the gold figure of an evaluation; None if it has no gold reward.

    Args:
        weights: weight of each gold reward; 1 for others.
    """
    if not quality.gold:
        return quality.gold_accuracy
    return sum(weights.get(name, 1.0) * value for name, value in quality.gold.items())


def worth_of(quality: EvaluationFigures, weights: Mapping[str, float]) -> float | None:
    """Return what versions are compared by: the gold figure, or without one the reward."""
    gold = gold_figure(quality, weights)
    return quality.reward if gold is None else gold


@dataclass(slots=True)
class GoldFigures:
    """Reads each record once: records never change."""

    store: ObjectStore
    run: str
    weights: Mapping[str, float]
    """Weight of each gold reward."""
    _known: dict[str, _Quality | None] = field(default_factory=dict)

    async def read(self) -> list[dict[int, float]]:
        """Return the gold figure of each version that has one, for each set of evaluation
        settings."""
        return await self._by_settings(gold_figure)

    async def worths(self) -> list[dict[int, float]]:
        """Return by what each evaluated version is compared with others of the same settings."""
        return await self._by_settings(worth_of)

    async def _by_settings(
        self, figure_of: Callable[[EvaluationFigures, Mapping[str, float]], float | None]
    ) -> list[dict[int, float]]:
        figures: defaultdict[str, dict[int, float]] = defaultdict(dict)
        for key, name in (await named_objects(self.store, self.run, "evaluations")).items():
            if name["settings"] is not None:
                if key not in self._known:
                    self._known[key] = await self._quality(key)
                quality = self._known[key]
                figure = None if quality is None else figure_of(quality, self.weights)
                if figure is not None:
                    figures[name["settings"]][int(name["number"])] = figure
        return list(figures.values())

    async def _quality(self, key: str) -> _Quality | None:
        try:
            return _Record.model_validate_json(await self.store.read(key) or b"").quality
        except ValidationError:
            log.warning("evaluation_unreadable", key=key)
            return None
