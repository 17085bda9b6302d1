"""From rewards to advantages: how much better a sample is than the others of its group (GRPO)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

EPSILON = 1e-4

Over = Literal["group", "batch"]


def group_advantages(rewards: Sequence[float], *, std: float | None = None) -> tuple[float, ...]:
    """(reward - mean) / (std + 1e-4), with the population standard deviation of the group.

    Equal rewards carry no signal: their advantages are exactly 0, whatever rounding says.
    ``std`` replaces the group's own, for normalisation over a whole batch (`population_std`).

    >>> group_advantages([1.0, 3.0])
    (-0.9999000099990001, 0.9999000099990001)
    """
    scale = (population_std(rewards) if std is None else std) + EPSILON
    return tuple(value / scale for value in centred(rewards))


def centred(rewards: Sequence[float]) -> tuple[float, ...]:
    """reward - mean; exactly 0 if all are equal.

    >>> centred([1.0, 3.0])
    (-1.0, 1.0)
    """
    if min(rewards) == max(rewards):
        return (0.0,) * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return tuple(reward - mean for reward in rewards)


def population_std(values: Sequence[float]) -> float:
    """Standard deviation with the number of values as denominator."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def batch_scale(rewards: Sequence[float]) -> float:
    """What the gradient of a batch is multiplied by, if its advantages were only centred: then it
    is that of advantages over the standard deviation of the whole batch, which is known last."""
    return 1 / (population_std(rewards) + EPSILON)


@dataclass(frozen=True, slots=True)
class Advantages:
    """How the samples of a group are compared."""

    std: Over = "group"
    """batch: they are only centred here; the trainer scales their gradient when it has all of them
    (`batch_scale`)."""
    weights: tuple[tuple[str, float], ...] = ()
    """(scorer, weight): each score is made an advantage of its own, and the advantages are summed.
    Without any, the rewards are compared, which are weighted sums of scores."""

    def of(
        self, rewards: Sequence[float], parts: Mapping[str, Sequence[float]]
    ) -> tuple[float, ...]:
        """Of one group, from its samples' rewards and the scores that make them up."""
        if self.std == "batch":
            return centred(rewards)
        if not self.weights:
            return group_advantages(rewards)
        columns = [
            [weight * value for value in group_advantages(parts[name])]
            for name, weight in self.weights
        ]
        return tuple(math.fsum(values) for values in zip(*columns, strict=True))
