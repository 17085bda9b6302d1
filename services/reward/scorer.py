"""Scorers: what they are, and how a recipe names one.

A scorer takes a fragment's media and the metadata of its prompt, and gives one number per sample.
An exception means that the fragment could not be scored; it is never turned into a number.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import structlog

from shared import recipe_rewards
from shared.contracts import Prompt
from shared.errors import ScoringError, UserError

log = structlog.get_logger()

Media = npt.NDArray[np.uint8]
"""Images (n, C, H, W) or videos (n, F, C, H, W)."""
Metadata = Sequence[Mapping[str, object]]
"""Of each sample's prompt, with its text as ``prompt``."""


class Scorer(Protocol):
    def score(self, media: Media, metadata: Metadata, /) -> list[float]:
        """One finite number per image, or per video for a scorer of videos."""


def told_of(prompt: Prompt) -> dict[str, object]:
    """What a scorer is told of a sample's prompt."""
    return {"prompt": prompt.text, **prompt.metadata}


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    name: str
    weight: float
    scorer: Scorer
    takes: Literal["images", "videos", "both"] = "images"

    def score(self, media: Media, metadata: Metadata) -> list[float]:
        """One number per sample: of a video that a scorer of images is given, the mean of its
        frames.

        Raises:
            ValueError: if a scorer of videos is given images, or a scorer of images gives other
                than one number per frame.
        """
        is_video = media.ndim == 5
        if self.takes == "videos" and not is_video:
            raise ValueError(f"scores videos, and these are images of shape {media.shape[1:]}")
        if self.takes != "images" or not is_video:
            return self.scorer.score(media, metadata)
        num_frames = media.shape[1]
        frames = media.reshape(-1, *media.shape[2:])
        repeated = [each for each in metadata for _ in range(num_frames)]
        scores = np.asarray(self.scorer.score(frames, repeated), dtype=np.float64)
        if scores.shape != (len(frames),):
            raise ValueError(f"gave {len(scores)} scores for {len(frames)} frames")
        means: list[float] = scores.reshape(-1, num_frames).mean(1).tolist()
        return means


def checked_scores(scorer: WeightedScorer, media: Media, metadata: Metadata) -> tuple[float, ...]:
    """One finite number per sample.

    Raises:
        ScoringError: if the scorer fails, or gives something else.
    """
    try:
        scores = scorer.score(media, metadata)
    except Exception as error:  # a scorer is anybody's code; its fault is these samples' alone
        log.exception("scorer_failed", scorer=scorer.name)
        raise ScoringError(f"{scorer.name}: {type(error).__name__}: {error}") from error
    if len(scores) != len(media) or not all(math.isfinite(score) for score in scores):
        raise ScoringError(
            f"{scorer.name} gave {len(scores)} scores for {len(media)} samples, "
            "or one that is not finite"
        )
    return tuple(scores)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a recipe may name as a scorer's type. To add one: CONTRIBUTING.md."""

    build: Callable[[recipe_rewards.Scorer], Scorer]
    needs: Literal["folder", "url"] | None = None
    """Of the recipe's table."""
    takes: Literal["images", "videos", "both"] = "images"


def build_scorers(tables: Sequence[recipe_rewards.Scorer]) -> list[WeightedScorer]:
    """Load what a recipe's ``reward.scorers`` name.

    Raises:
        UserError: if a type is unknown or its folder is not as it should be.
    """
    return [_build(f"reward.scorers.{table.name}", table) for table in tables]


def kind_of(table: recipe_rewards.Scorer) -> Kind:
    """Raises UserError if there is no such type, or its folder is not there."""
    field = f"reward.scorers.{table.name}"
    if table.type not in KINDS:
        known = ", ".join(sorted(KINDS))
        raise UserError(f"{field}.type: no scorer is called {table.type!r}; known are: {known}")
    kind = KINDS[table.type]
    if kind.needs == "folder" and table.folder is None:
        raise UserError(f"{field}.folder: {table.type} needs the folder with its weights")
    if kind.needs == "url" and not (table.url or "").startswith(("http://", "https://")):
        raise UserError(f"{field}.url: {table.type} needs the address of its server, http://...")
    if table.folder is not None and not table.folder.is_dir():
        raise UserError(f"{field}.folder: no folder {table.folder}")
    return kind


def _build(field: str, table: recipe_rewards.Scorer) -> WeightedScorer:
    kind = kind_of(table)
    try:
        scorer = kind.build(table)
    except OSError as error:
        raise UserError(f"{field}.folder: cannot load {table.folder}: {error}") from error
    return WeightedScorer(table.name, table.weight, scorer, kind.takes)


def _digit_probability(table: recipe_rewards.Scorer) -> Scorer:
    from services.reward.scorers.digits import DigitProbability

    assert table.folder is not None  # kind_of has looked
    return DigitProbability(table.folder)


def _jpeg_incompressibility(_: recipe_rewards.Scorer) -> Scorer:
    from services.reward.scorers.jpeg import JpegIncompressibility

    return JpegIncompressibility()


def _jpeg_compressibility(_: recipe_rewards.Scorer) -> Scorer:
    from services.reward.scorers.jpeg import JpegCompressibility

    return JpegCompressibility()


def _temporal_consistency(_: recipe_rewards.Scorer) -> Scorer:
    from services.reward.scorers.video import TemporalConsistency

    return TemporalConsistency()


def _remote(table: recipe_rewards.Scorer) -> Scorer:
    from services.reward.scorers.remote import RemoteScorer

    assert table.url is not None  # kind_of has looked
    return RemoteScorer(table.url, patience=table.patience)


def _ocr(_: recipe_rewards.Scorer) -> Scorer:
    try:
        from services.reward.scorers.ocr import OcrText
    except ImportError as error:
        raise UserError(f'type "ocr" needs the extra digenrl[ocr]: {error}') from error
    return OcrText()


KINDS: Mapping[str, Kind] = {
    "digit-probability": Kind(_digit_probability, needs="folder"),
    "jpeg-incompressibility": Kind(_jpeg_incompressibility),
    "jpeg-compressibility": Kind(_jpeg_compressibility),
    "ocr": Kind(_ocr),
    "remote": Kind(_remote, needs="url", takes="both"),
    "temporal-consistency": Kind(_temporal_consistency, takes="videos"),
}
