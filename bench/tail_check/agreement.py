"""Compares two scores of the same samples by rank: whether one puts them in the other's order."""

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from shared.messages.records import Record

Correlation = Annotated[float, Field(ge=-1, le=1)]


class Agreement(Record):
    """Holds rank correlations (Spearman) of two scores of the same samples."""

    within: Correlation | None
    """Mean over the groups of the correlation in each, where samples of a group are compared as the
    advantages compare them; None if no group's scores differ."""
    error: Annotated[float, Field(ge=0)] | None
    """Standard error of that mean; None of fewer than two groups."""
    groups: int
    """Number of groups in the mean: those whose scores by all steps differ."""
    overall: Correlation | None
    """Correlation over all samples, of whatever prompt; None if all are equal."""


def agreement(
    whole: Sequence[Sequence[float | None]], coarse: Sequence[Sequence[float | None]]
) -> Agreement:
    """Compare the scores of groups by all steps (``whole``) with those of the same samples by a
    coarse tail. Samples that one of them could not score are left out."""
    pairs = [_both_known(*groups) for groups in zip(whole, coarse, strict=True)]
    found = [
        spearman(full, short) or 0.0  # a tail that makes them all equal ranks nothing
        for full, short in pairs
        if len(full) > 1 and min(full) < max(full)
    ]
    mean = math.fsum(found) / len(found) if found else None
    together = [[score for pair in pairs for score in pair[side]] for side in (0, 1)]
    return Agreement(
        within=mean,
        error=_error_of_mean(found),
        groups=len(found),
        overall=spearman(together[0], together[1]),
    )


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the correlation of the ranks of two sequences of one length; equal values share the
    mean of their ranks. None if all values of one are equal.

    >>> spearman([1, 2, 3], [10, 30, 20])
    0.5
    """
    ranks, others = _ranks(one), _ranks(other)
    middle = (len(ranks) - 1) / 2
    products = [(a - middle, b - middle) for a, b in zip(ranks, others, strict=True)]
    spreads = [math.fsum(pair[side] ** 2 for pair in products) for side in (0, 1)]
    if not all(spreads):
        return None
    both = math.fsum(a * b for a, b in products)
    return max(-1.0, min(1.0, both / math.sqrt(spreads[0] * spreads[1])))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks, first = [0.0] * len(values), 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values[order[last + 1]] == values[order[first]]:
            last += 1
        for place in range(first, last + 1):
            ranks[order[place]] = (first + last) / 2
        first = last + 1
    return ranks


def _both_known(
    one: Sequence[float | None], other: Sequence[float | None]
) -> tuple[list[float], list[float]]:
    known = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return [a for a, _ in known], [b for _, b in known]


def _error_of_mean(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))
