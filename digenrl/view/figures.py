"""Picks what the pages show of a run's steps, evaluations and devices."""

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from digenrl.api.batch_records import rank
from digenrl.api.models import SampleHistory
from digenrl.api.run_history import RunHistory
from digenrl.api.run_routes import metric_columns
from digenrl.reading.facts import evaluation_view

PER_PAGE = 50
"""Rows of a table."""


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
