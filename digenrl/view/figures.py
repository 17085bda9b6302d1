"""Compares a sample with its group."""

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from digenrl.api.batch_records import rank
from digenrl.api.models import SampleHistory


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
