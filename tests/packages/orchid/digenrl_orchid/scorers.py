"""Two scorers: a class, and one that says more of itself."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from digenrl.plugins import ScorerKind

Metadata = Sequence[Mapping[str, object]]


class Ink:
    """Scores the mean of all pixels, from 0 to 1."""

    def score(self, images: Any, metadata: Metadata) -> list[float]:
        scores: list[float] = (images.reshape(len(images), -1).mean(1) / 255).tolist()
        return scores


class InkAbove(Ink):
    def __init__(self, folder: Path) -> None:
        self._threshold = float((folder / "threshold.txt").read_text())

    def score(self, images: Any, metadata: Metadata) -> list[float]:
        return [score - self._threshold for score in super().score(images, metadata)]


INK_ABOVE = ScorerKind(f"{__name__}:InkAbove", needs="folder", files=("threshold.txt",), extra="")
