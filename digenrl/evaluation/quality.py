"""The figures of one policy version, and what they say when one compares several."""

from collections.abc import Sequence

from pydantic import BaseModel


class Quality(BaseModel):
    """Of the samples of one policy version, at the evaluation's fixed seed."""

    reward: float
    """Mean training reward."""
    num_samples: int
    rewards: dict[str, float] = {}
    """Mean score of each scorer of training, without its weight."""
    gold: dict[str, float] = {}
    """Mean score of each scorer of `evaluation.scorers`, which is never trained on."""
    proxy_accuracy: float | None = None
    """Share of samples that the training reward's own classifier takes for the digit asked for."""
    gold_accuracy: float | None = None
    """The same by a network of another kind, taught on the other half of the data."""
    gold_svm_accuracy: float | None = None
    """The same by a support vector machine."""
    gold_accuracy_per_digit: list[float | None] | None = None
    gold_worst_digit: float | None = None
    gold_nn: float | None = None
    """Mean L2 distance to the nearest real image of the held-out half; rises when glyphs break."""
    gold_div: float | None = None
    """Mean L2 distance within a digit; falls when samples collapse to one."""
    gold_nn_per_digit: list[float | None] | None = None
    gold_div_per_digit: list[float | None] | None = None


def alarms(measured: Sequence[Quality]) -> list[str]:
    """What is to be said aloud of the newest of a run's evaluations, which are given oldest first:
    a line for each gold reward that has fallen while the training reward has risen, since the
    first evaluation or else at each of the last two."""
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
    """Names of the gold rewards that fell while the training reward rose."""
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
