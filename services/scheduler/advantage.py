"""Group-relative advantages (GRPO)."""

import math
from collections.abc import Sequence

EPSILON = 1e-4


def group_advantages(rewards: Sequence[float], *, std: float | None = None) -> tuple[float, ...]:
    """(reward - mean) / (std + 1e-4), with the population standard deviation of the group.

    Equal rewards carry no signal: their advantages are exactly 0, whatever rounding says.
    ``std`` replaces the group's own, for normalisation over a whole batch (`population_std`).

    >>> group_advantages([1.0, 3.0])
    (-0.9999000099990001, 0.9999000099990001)
    """
    if min(rewards) == max(rewards):
        return (0.0,) * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    scale = (population_std(rewards) if std is None else std) + EPSILON
    return tuple((reward - mean) / scale for reward in rewards)


def population_std(values: Sequence[float]) -> float:
    """Standard deviation with the number of values as denominator."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
