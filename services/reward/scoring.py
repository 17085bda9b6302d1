"""Reads and checks generated media, and scores them, however a scorer behaves."""

from dataclasses import dataclass
from typing import Self

import structlog

from services.reward.scorer import Media, Metadata, WeightedScorer
from shared.errors import ContractError, ScorerUnavailable, ScoringError
from shared.messages.contracts import MAX_SCORE
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
    def of(cls, recipe: Recipe) -> Self:
        model = recipe.model
        return cls(height=model.height, width=model.width, frames=model.frames)


def read_media(data: bytes, num_samples: int, size: MediaSize | None = None) -> Media:
    """Reads images (n, C, H, W) or videos (n, F, C, H, W) of so many samples, of ``size`` if given;
    nothing of any other size is unpacked.

    Raises:
        ContractError: if the object holds anything else.
    """

    def check(shape: Shape) -> None:
        if len(shape) not in (4, 5) or shape[0] != num_samples or 0 in shape:
            raise ContractError(
                f"media of shape {list(shape)} are no images or videos of {num_samples} samples"
            )
        if size is not None:
            _check_size(shape, size)

    return read(data, check)


def _check_size(shape: Shape, size: MediaSize) -> None:
    frames = shape[1] if len(shape) == 5 else 1
    found = (*shape[-2:], frames)
    wanted = (size.height, size.width, size.frames)
    if found != wanted or shape[-3] not in (1, 3, 4):
        raise ContractError(
            f"media of shape {list(shape)}; the recipe makes {size.height} x {size.width} pixels, "
            f"{size.frames} frames"
        )


RETRIES = 2
"""Times that a sample which failed is scored again, alone."""

log = structlog.get_logger()


def scores_of(
    scorer: WeightedScorer, images: Media, metadata: Metadata, *, may_all_fail: bool = False
) -> tuple[float | None, ...]:
    """Scores all samples together, then those that failed one by one; None if one fails again.

    Raises:
        ScorerUnavailable: if the scorer runs elsewhere and does not answer.
        ScoringError: if the scorer does not return one number per sample, or, unless
            ``may_all_fail``, scores none of them.
    """
    scores, reason = _tried(scorer, images, metadata)
    for _ in range(RETRIES):
        for sample in [number for number, score in enumerate(scores) if score is None]:
            alone = slice(sample, sample + 1)
            [scores[sample]], reason = _tried(scorer, images[alone], metadata[alone])
    failed = scores.count(None)
    if failed == len(scores) and not may_all_fail:
        raise ScoringError(f"{scorer.name}: {reason}")
    if failed:
        SAMPLES_FAILED.labels(scorer=scorer.name).inc(failed)
        log.error("samples_failed", scorer=scorer.name, failed=failed, reason=reason)
    return tuple(scores)


def _tried(
    scorer: WeightedScorer, images: Media, metadata: Metadata
) -> tuple[list[float | None], str]:
    """Returns a finite number or None for each sample, and the reason for None."""
    try:
        scores = scorer.score(images, metadata)
    except ScorerUnavailable as error:
        log.error("scorer_unavailable", scorer=scorer.name, error=str(error))
        raise ScorerUnavailable(f"{scorer.name}: {error}") from error
    except Exception as error:  # a scorer is anybody's code; its fault is these samples' alone
        log.exception("scorer_failed", scorer=scorer.name)
        return [None] * len(images), f"{type(error).__name__}: {error}"
    if len(scores) != len(images):
        raise ScoringError(f"{scorer.name} gave {len(scores)} scores for {len(images)} samples")
    return [_sane(score) for score in scores], f"a score that is not finite, or over {MAX_SCORE:g}"


def _sane(score: float) -> float | None:
    return float(score) if abs(score) <= MAX_SCORE else None  # false for what is no number
