"""Holds the figures of a policy version, and compares those of several versions."""

from collections.abc import Sequence

from pydantic import BaseModel


class Quality(BaseModel):
    """Holds the figures of one policy version's samples at the evaluation's fixed seed."""

    reward: float
    """Mean training reward."""
    num_samples: int
    rewards: dict[str, float] = {}
    """Mean score of each training scorer, without its weight."""
    gold: dict[str, float] = {}
    """Mean score of each scorer in `evaluation.scorers`, never trained on."""
    proxy_accuracy: float | None = None
    """Share of samples that the training reward's classifier takes for the requested digit."""
    gold_accuracy: float | None = None
    """The same share for a network of another kind, trained on the other half of the data."""
    gold_svm_accuracy: float | None = None
    """The same share for a support vector machine."""
    gold_accuracy_per_digit: list[float | None] | None = None
    gold_worst_digit: float | None = None
    gold_nn: float | None = None
    """Mean L2 distance to the nearest real image of the held-out half; rises when glyphs break."""
    gold_div: float | None = None
    """Mean L2 distance within a digit; falls when samples collapse to one."""
    gold_nn_per_digit: list[float | None] | None = None
    gold_div_per_digit: list[float | None] | None = None


def alarms(measured: Sequence[Quality]) -> list[str]:
    """Return a line for each gold reward that has fallen while the training reward has risen.

    A gold reward counts if it is lower than at the first evaluation, or else if it fell at each of
    the last two. ``measured`` holds the evaluations of a run, oldest first."""
    if len(measured) < 2:
        return []
    first, newest = measured[0], measured[-1]
    since_first = fallen(first, newest)
    lines = [_line(first, newest, name) for name in since_first]
    if len(measured) > 2:
        before, between = measured[-3:-1]
        again = set(fallen(before, between)) & set(fallen(between, newest))
        lines += [
            f"at the last two evaluations {_line(before, newest, name)}"
            for name in sorted(again.difference(since_first))
        ]
    return lines


def fallen(before: Quality, after: Quality) -> list[str]:
    """List the gold rewards that fell while the training reward rose."""
    if after.reward <= before.reward:
        return []
    return [
        name
        for name, value in after.gold.items()
        if name in before.gold and value < before.gold[name]
    ]


def _line(before: Quality, after: Quality, name: str) -> str:
    return (
        f"the training reward rose from {before.reward:.4g} to {after.reward:.4g} while the gold "
        f"reward {name} fell from {before.gold[name]:.4g} to {after.gold[name]:.4g}"
    )
