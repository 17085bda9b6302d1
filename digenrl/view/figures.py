"""Picks what the pages show of a run's steps, evaluations and devices."""

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from fastapi import HTTPException

from digenrl.api.batch_records import rank
from digenrl.api.models import SampleHistory
from digenrl.api.run_history import RunHistory
from digenrl.api.run_routes import metric_columns
from digenrl.reading.facts import evaluation_view

PER_PAGE = 50
"""Rows of a table."""
MAX_SHOWN_SAMPLES = 60
"""Samples of an evaluation that are shown, as many of each prompt."""


def curves_of(history: RunHistory, after: int) -> dict[str, Any]:
    """Return columns of numbers: one row per step, and one per evaluation."""
    steps = [step for step in history.steps[max(0, after + 1) :] if step.batch is not None]
    figures = [evaluation_view(each).named_figures for each in history.evaluations]
    return {
        "run": history.run,
        "version": [step.version for step in steps],
        "metrics": metric_columns(steps),
        "evaluated": [each.version for each in history.evaluations],
        "figures": {
            name: [each.get(name) for each in figures]
            for name in sorted({name for each in figures for name in each})
        },
    }


def samples_of(history: RunHistory, version: int | None) -> dict[str, Any]:
    """Return the first samples of every prompt, of the first version and of another."""
    if not history.evaluations:
        return {"pairs": [], "chosen": None, "evaluated": []}
    first = history.evaluations[0]
    evaluations = {each.version: each for each in history.evaluations}
    if version is not None and version not in evaluations:
        raise HTTPException(404, f"version {version} was not evaluated")
    chosen = history.evaluations[-1] if version is None else evaluations[version]
    each_prompt = max(
        1, MAX_SHOWN_SAMPLES // max(1, len({sample.prompt for sample in chosen.samples}))
    )
    counts: dict[str, int] = {}
    pairs: list[dict[str, Any]] = []
    for before, after in zip(first.samples, chosen.samples, strict=True):
        counts[after.prompt] = counts.get(after.prompt, 0) + 1
        if counts[after.prompt] <= each_prompt and len(pairs) < MAX_SHOWN_SAMPLES:
            pairs.append({
                "prompt": after.prompt, "right": after.right,
                "source": None if after.source is None else _name(after.source.key),
                "before": _name(before.still.key), "after": _name(after.still.key),
                "video": _name(after.media.key) if after.media != after.still else None,
            })  # fmt: skip
    return {"pairs": pairs, "chosen": chosen.version, "evaluated": sorted(evaluations)}


def sample_of(group: Sequence[SampleHistory], number: int) -> dict[str, Any] | None:
    """Return a sample among the others of its group; None if the group has none of this number."""
    if not 0 <= number < len(group):
        return None
    one, ranked = group[number], sorted(group, key=lambda each: rank(each.reward, worst=True))
    rewards = [each.reward for each in group if each.reward is not None]
    scores = {name: [each.scores.get(name) for each in group] for name in one.scores}
    means = {
        name: fmean(numbers) for name, every in scores.items()
        if (numbers := [score for score in every if score is not None])
    }  # fmt: skip
    return {
        "one": one, "ranked": ranked, "place": ranked.index(one) + 1, "score_means": means,
        "mean": fmean(rewards) if rewards else None, "spread": pstdev(rewards) if rewards else None,
    }  # fmt: skip


def _name(key: str) -> str:
    return key.rsplit("/", 1)[1]
