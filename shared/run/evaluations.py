"""What the scheduler reads of evaluations: how good a version is, by rewards that nobody trains on.

The gold figure of a version is the weighted sum of its gold rewards (`evaluation.scorers`), as the
training reward is one of the training rewards; without any, the accuracy of the held-out digit
judge (`evaluation.digits`).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import structlog
from pydantic import BaseModel, FiniteFloat, ValidationError

from shared.run.layout import evaluations_folder
from shared.store import ObjectStore

RECORD = re.compile(r"/([^/]+)/records/(\d+)\.json\Z")
"""Matches the key of a record: its settings and its version."""

log = structlog.get_logger()


class _Quality(BaseModel):
    gold: dict[str, FiniteFloat] = {}
    gold_accuracy: FiniteFloat | None = None


class _Record(BaseModel):
    quality: _Quality


def reached(figures: Iterable[Mapping[int, float]], goal: float) -> int | None:
    """Return the first version whose figure and the one evaluated before it, with the same
    settings, are ``goal`` at least; None if there is none yet. A single one may be luck."""
    found = [
        version
        for each in figures
        for before, version in pairwise(sorted(each))
        if min(each[before], each[version]) >= goal
    ]
    return min(found, default=None)


@dataclass(slots=True)
class GoldFigures:
    """Reads each record once: records never change."""

    store: ObjectStore
    run: str
    weights: Mapping[str, float]
    """Weight of each gold reward."""
    _known: dict[str, float | None] = field(default_factory=dict)

    async def read(self) -> list[dict[int, float]]:
        """Return the figure of each version that has one, for each set of evaluation settings."""
        found: defaultdict[str, dict[int, float]] = defaultdict(dict)
        for key in await self.store.keys(evaluations_folder(self.run)):
            match = RECORD.search(key)
            if match is not None:
                if key not in self._known:
                    self._known[key] = await self._figure(key)
                figure = self._known[key]
                if figure is not None:
                    found[match[1]][int(match[2])] = figure
        return list(found.values())

    async def _figure(self, key: str) -> float | None:
        try:
            quality = _Record.model_validate_json(await self.store.read(key) or b"").quality
        except ValidationError:
            log.warning("evaluation_unreadable", key=key)
            return None
        if not quality.gold:
            return quality.gold_accuracy
        return sum(self.weights.get(name, 1.0) * value for name, value in quality.gold.items())
