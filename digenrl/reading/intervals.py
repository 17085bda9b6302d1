"""Computes 95 % confidence intervals of means and shares, and gains."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, pvariance, stdev
from typing import NamedTuple

Z = 1.96
"""Standard deviations within which 95 % of a normal distribution lie."""


class Interval(NamedTuple):
    """An estimate, and the interval that contains the true value with 95 % certainty."""

    estimate: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        return not self.low <= value <= self.high


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the mean of values; None if there are fewer than two.

    >>> [round(each, 2) for each in mean_interval([1.0, 2.0, 3.0])]
    [2.0, 0.87, 3.13]
    """
    if len(values) < 2:
        return None
    mean, margin = fmean(values), Z * stdev(values) / sqrt(len(values))
    return Interval(mean, mean - margin, mean + margin)


def standard_gain(before: Sequence[float], after: Sequence[float]) -> float | None:
    """Return the difference of the means in standard deviations; None without a deviation.

    >>> standard_gain([0.0, 2.0], [2.0, 4.0]), standard_gain([1.0], [2.0])
    (2.0, None)
    """
    deviation = sqrt((pvariance(before) + pvariance(after)) / 2)
    return (fmean(after) - fmean(before)) / deviation if deviation else None


def share_interval(number: int, total: int) -> Interval | None:
    """Return the share ``number / total`` with Wilson's score interval; None if ``total`` is 0.

    >>> [round(each, 2) for each in share_interval(9, 10)]
    [0.9, 0.6, 0.98]
    """
    if not total:
        return None
    share, spread = number / total, Z**2 / total
    centre = (share + spread / 2) / (1 + spread)
    margin = Z * sqrt((share * (1 - share) + spread / 4) / total) / (1 + spread)
    return Interval(share, centre - margin, centre + margin)
