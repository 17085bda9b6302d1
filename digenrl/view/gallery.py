"""Arranges the samples of two evaluations as tiles: the same prompts and noise, two versions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple

from fastapi import HTTPException

from digenrl.api.run_routes import media_link
from digenrl.evaluation.records import REWARD, EvaluationRecord, KeptSample
from shared.recipe.recipe import Recipe

MAX_TILES = 500
"""Tiles of a page."""
Sort = Literal["order", "best", "worst", "gained", "lost"]
Place = tuple[str, str, int]
"""Prompt, digest of the image that is edited, and place among the samples of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A sample of a version, and the sample of another version from the same prompt and noise.
    Addresses are below the address of the run."""

    number: int
    """Place in the evaluation."""
    prompt: str
    after: str
    """Address of the picture; of a video the middle frame."""
    before: str
    video: str | None
    """Address of the video; None for a picture."""
    video_before: str | None
    source: str | None
    """Address of the image that is edited."""
    right: bool | None
    """Whether the held-out classifier recognises it; None without one."""
    scores: Mapping[str, float | None]
    scores_before: Mapping[str, float | None]
    score: float | None
    """Score by the chosen scorer."""
    change: float | None
    """Difference to the score of the other version; None if either has none."""


def evaluation_of(evaluations: Sequence[EvaluationRecord], version: int) -> EvaluationRecord:
    """Return the evaluation of a version; raises HTTPException if it was not evaluated."""
    for each in evaluations:
        if each.version == version:
            return each
    raise HTTPException(404, f"version {version} was not evaluated")


def scorers_of(record: EvaluationRecord) -> list[str]:
    """Return the names of scores, the reward first, without a score that is the reward itself."""
    names = dict.fromkeys(name for each in record.samples for name in each.scores)
    return sorted(
        (name for name in names if name == REWARD or any(
            each.scores.get(name) != each.scores.get(REWARD) for each in record.samples
        )), key=lambda name: name != REWARD,
    )  # fmt: skip


def tiles_of(before: EvaluationRecord, after: EvaluationRecord, scorer: str) -> list[Tile]:
    """Return a tile for each sample that both evaluations have, in the order of ``after``."""
    others = _by_place(before)
    return [
        _tile(number, sample, others[place], scorer)
        for number, (place, sample) in enumerate(_by_place(after).items())
        if place in others
    ]


def _by_place(record: EvaluationRecord) -> dict[Place, KeptSample]:
    places: dict[Place, KeptSample] = {}
    counts: dict[tuple[str, str], int] = {}
    for sample in record.samples:
        key = sample.prompt, "" if sample.source is None else sample.source.sha256
        counts[key] = counts.get(key, -1) + 1
        places[*key, counts[key]] = sample
    return places


def _tile(number: int, sample: KeptSample, other: KeptSample, scorer: str) -> Tile:
    score, old = sample.scores.get(scorer), other.scores.get(scorer)
    is_video = sample.media != sample.still
    return Tile(
        number=number, prompt=sample.prompt, right=sample.right,
        after=media_link(sample.still), before=media_link(other.still),
        video=media_link(sample.media) if is_video else None,
        video_before=media_link(other.media) if is_video else None,
        source=None if sample.source is None else media_link(sample.source),
        scores=sample.scores, scores_before=other.scores, score=score,
        change=None if score is None or old is None else score - old,
    )  # fmt: skip


def arranged(tiles: Sequence[Tile], prompt: str, sort: Sort) -> list[Tile]:
    """Return the tiles whose prompt contains ``prompt``, sorted; tiles without a score last."""
    chosen = [each for each in tiles if prompt.lower() in each.prompt.lower()]
    sign = -1 if sort in ("best", "gained") else 1

    def key(tile: Tile) -> tuple[bool, float]:
        value = tile.score if sort in ("best", "worst") else tile.change
        return value is None, 0.0 if value is None else sign * value

    return chosen if sort == "order" else sorted(chosen, key=key)


class Counts(NamedTuple):
    """How many scores rose and fell, and their means."""

    higher: int
    lower: int
    mean_before: float
    mean_after: float


def count_changes(tiles: Sequence[Tile]) -> Counts | None:
    """Compare the scores of two versions; None if no tile has a score in both."""
    pairs = [
        (each.score - each.change, each.score)
        for each in tiles
        if each.score is not None and each.change is not None
    ]
    if not pairs:
        return None
    before, after = zip(*pairs, strict=True)
    changes = [tile.change for tile in tiles if tile.change is not None]
    higher, lower = sum(each > 0 for each in changes), sum(each < 0 for each in changes)
    return Counts(higher, lower, fmean(before), fmean(after))


def gallery_of(
    evaluations: Sequence[EvaluationRecord], version: int | None, against: int | None,
    *, scorer: str, prompt: str, sort: Sort, first: int,
) -> dict[str, Any]:  # fmt: skip
    """Return what the gallery shows: by default the newest version against the first one.

    Raises:
        HTTPException: if a version was not evaluated, or no scorer has this name.
    """
    if not evaluations:
        return {"evaluated": []}
    after = evaluations[-1] if version is None else evaluation_of(evaluations, version)
    before = evaluations[0] if against is None else evaluation_of(evaluations, against)
    scorers = scorers_of(after)
    if scorer and scorer not in scorers:
        raise HTTPException(404, f"scorer: no sample has a score of {scorer!r}")
    chosen = scorer or next(iter(scorers), "")
    tiles = tiles_of(before, after, chosen)
    shown = arranged(tiles, prompt, sort)
    return {
        "evaluated": [each.version for each in evaluations], "chosen": after.version,
        "against": before.version, "scorer": chosen, "scorers": scorers, "prompt": prompt,
        "prompts": list(dict.fromkeys(each.prompt for each in tiles)), "sort": sort,
        "tiles": shown[first : first + MAX_TILES], "number": len(shown), "first": first,
        "next": first + MAX_TILES if len(shown) > first + MAX_TILES else None,
        "counts": count_changes(shown) if after is not before else None,
    }  # fmt: skip


def picture_ratio(recipe: Recipe | None) -> float:
    """Return the width of an evaluation's pictures over their height."""
    if recipe is None:
        return 1.0
    table, model = recipe.evaluation, recipe.model
    return (table.width or model.width) / (table.height or model.height)
