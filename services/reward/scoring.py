"""Reads and checks generated media, and scores them, however a scorer behaves."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import structlog

from services.reward import limits
from services.reward.scorer import Media, Metadata, WeightedScorer
from shared.errors import ContractError, SamplesFailed, ScorerUnavailable, ScoringError
from shared.learning.pictures import WHITE, decoded
from shared.limits import MAX_SCORE
from shared.recipe.recipe import Recipe
from shared.store.media import Shape, read
from shared.telemetry import SAMPLES_FAILED


@dataclass(frozen=True, slots=True)
class MediaSize:
    """Holds the size of one sample in pixels."""

    height: int
    width: int
    frames: int = 1

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        model = recipe.model
        return cls(height=model.height, width=model.width, frames=model.frames)


def read_media(data: bytes, num_samples: int, size: MediaSize | None = None) -> Media:
    """Read the images (n, C, H, W) or videos (n, F, C, H, W) of these samples, of ``size`` if
    given; other sizes are refused before unpacking.

    Raises:
        ContractError: if the object holds anything else.
    """

    def check(shape: Shape) -> None:
        if len(shape) not in (4, 5) or shape[0] != num_samples or 0 in shape:
            raise ContractError(f"media of shape {list(shape)} do not fit {num_samples} samples")
        if size is not None:
            _check_size(shape, size)

    return read(data, check)


def _check_size(shape: Shape, size: MediaSize) -> None:
    frames = shape[1] if len(shape) == 5 else 1
    given_size = (*shape[-2:], frames)
    wanted = (size.height, size.width, size.frames)
    if given_size != wanted or shape[-3] not in (1, 3, 4):
        raise ContractError(
            f"media of shape {list(shape)}; the recipe makes {size.height} x {size.width} pixels, "
            f"{size.frames} frames"
        )


def load_source(file: bytes, media: Media, background: str = WHITE) -> Media:
    """Returns the source image (C, H, W) of media (n, ..., C, H, W), at their size, over
    ``background`` where it is transparent.

    Raises:
        ContractError: if the file is no image.
    """
    channels, height, width = media.shape[-3:]
    picture: Media = decoded(
        file, height=height, width=width, channels=channels, background=background
    )
    return picture


NOT_FINITE = f"a score that is not finite, or over {MAX_SCORE:g}"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ScoringOutcome:
    """Is what a scorer makes of the samples of a fragment."""

    scores: tuple[float | None, ...]
    """None: the sample has no score."""
    reasons: Mapping[int, str]
    """Why not, in one line, for each of those."""


def score_samples(
    scorer: WeightedScorer, images: Media, metadata: Metadata, *, may_all_fail: bool = False
) -> tuple[float | None, ...]:
    """Scores all samples as `score_each` does."""
    return score_each(scorer, images, metadata, may_all_fail=may_all_fail).scores


def score_each(
    scorer: WeightedScorer, images: Media, metadata: Metadata, *, may_all_fail: bool = False
) -> ScoringOutcome:
    """Scores all samples together, then those that failed one by one, unless they would fail again;
    None if one has no score then.

    Raises:
        ScorerUnavailable: if the scorer runs elsewhere and does not answer.
        ScoringError: if the scorer does not return one number per sample, or, unless
            ``may_all_fail``, if every sample fails.
    """
    first = _tried(scorer, images, metadata)
    scores, reasons = list(first.scores), dict(first.reasons)
    again = set() if scorer.whole_groups else reasons.keys() - first.final
    for _ in range(limits.MAX_RETRIES):
        for sample in sorted(again):
            alone = slice(sample, sample + 1)
            tried = _tried(scorer, images[alone], metadata[alone])
            [scores[sample]] = tried.scores
            if scores[sample] is None:
                reasons[sample] = tried.reasons[0]
            if scores[sample] is not None or tried.final:
                again.discard(sample)
    reasons = {sample: reason for sample, reason in reasons.items() if scores[sample] is None}
    if len(reasons) == len(scores) and not may_all_fail:
        raise ScoringError(f"{scorer.name}: {first_reason(reasons)}")
    if reasons:
        SAMPLES_FAILED.labels(scorer=scorer.name).inc(len(reasons))
        log.error(
            "samples_failed", scorer=scorer.name, failed=len(reasons), reason=first_reason(reasons)
        )
    return ScoringOutcome(tuple(scores), reasons)


def first_reason(reasons: Mapping[int, str]) -> str:
    """Returns the reason of the first sample."""
    return reasons[min(reasons)]


def _tried(scorer: WeightedScorer, images: Media, metadata: Metadata) -> SamplesFailed:
    """Returns a finite number or None for each sample, the reasons for None, and the samples that
    would fail again."""
    final: Iterable[int] = ()
    causes: Mapping[int, str] = {}
    try:
        scores: Sequence[float | None] = scorer.score(images, metadata)
    except ScorerUnavailable as error:
        log.error("scorer_unavailable", scorer=scorer.name, error=str(error))
        raise ScorerUnavailable(f"{scorer.name}: {error}") from error
    except SamplesFailed as error:
        scores, causes, final = error.scores, error.reasons, error.final
    except Exception as error:  # a scorer is anybody's code; its fault is these samples' alone
        log.exception("scorer_failed", scorer=scorer.name)
        scores = [None] * len(images)
        causes = dict.fromkeys(range(len(images)), f"{type(error).__name__}: {error}")
    if len(scores) != len(images):
        raise ScoringError(f"{scorer.name} gave {len(scores)} scores for {len(images)} samples")
    sane = [None if score is None else _sane(score) for score in scores]
    reasons = {n: causes.get(n, NOT_FINITE) for n, score in enumerate(sane) if score is None}
    return SamplesFailed(sane, reasons, final)


def _sane(score: float) -> float | None:
    return float(score) if abs(score) <= MAX_SCORE else None  # false for what is no number
