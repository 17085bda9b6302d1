"""Scorers: what they are, and how a recipe names one.

A scorer takes a fragment's media and the metadata of its prompt, and gives one number per sample.
An exception means that the fragment could not be scored; it is never turned into a number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared import recipe
from shared.errors import UserError


class Scorer(Protocol):
    def score(
        self, images: npt.NDArray[np.uint8], metadata: Sequence[Mapping[str, object]]
    ) -> list[float]:
        """One finite number per image of (n, C, H, W)."""


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    name: str
    weight: float
    scorer: Scorer


def build_scorers(tables: Sequence[recipe.Scorer]) -> list[WeightedScorer]:
    """Load what a recipe's ``reward.scorers`` name.

    Raises:
        UserError: if a type is unknown or its folder is not as it should be.
    """
    return [
        WeightedScorer(table.name, table.weight, _build(f"reward.scorers.{table.name}", table))
        for table in tables
    ]


def _build(field: str, table: recipe.Scorer) -> Scorer:
    if table.type not in BUILDERS:
        known = ", ".join(sorted(BUILDERS))
        raise UserError(f"{field}.type: no scorer is called {table.type!r}; known are: {known}")
    if table.folder is None:
        raise UserError(f"{field}.folder: {table.type} needs the folder with its weights")
    try:
        return BUILDERS[table.type](table.folder)
    except OSError as error:
        raise UserError(f"{field}.folder: cannot load {table.folder}: {error}") from error


def _digit_probability(folder: Path) -> Scorer:
    from services.reward.scorers.digits import DigitProbability

    return DigitProbability(folder)


BUILDERS: dict[str, Callable[[Path], Scorer]] = {"digit-probability": _digit_probability}
"""By the type that a recipe names. To add one: CONTRIBUTING.md, "How to add a reward"."""
