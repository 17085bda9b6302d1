"""From rewards to advantages: how much better a sample is than the others of its group (GRPO)."""

import math
from collections.abc import Iterator, Mapping, Sequence
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


def best_and_worst(advantages: Sequence[float], number: int) -> list[int]:
    """Return which samples of a group are trained if these are ``number`` in all: half of them the
    best, half the worst. Of equal ones, later samples count as better.

    >>> best_and_worst([0.5, -1.0, 0.0, 1.5], 2)
    [1, 3]
    """
    ascending = sorted(range(len(advantages)), key=lambda sample: (advantages[sample], sample))
    return sorted([*ascending[: number // 2], *ascending[len(ascending) - number // 2 :]])


def population_std(values: Sequence[float]) -> float:
    """Return the standard deviation with the number of values as denominator."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def batch_scale(rewards: Sequence[float]) -> float:
    """Returns the factor that turns a batch's gradient by centred advantages into the gradient by
    advantages over the standard deviation of the whole batch, which is known last."""
    return 1 / (population_std(rewards) + EPSILON)


def with_reward(rewards: Sequence[float | None]) -> list[int]:
    """Return the samples that could be scored."""
    return [sample for sample, reward in enumerate(rewards) if reward is not None]


def _picked(values: Sequence[float | None], samples: Sequence[int]) -> list[float]:
    picked = [values[sample] for sample in samples]
    return [value for value in picked if value is not None]


@dataclass(frozen=True, slots=True)
class Advantages:
    """Compares the samples of a group."""

    std: Over = "group"
    """batch: they are only centred here; the trainer scales their gradient when it has all of them
    (`batch_scale`)."""
    weights: tuple[tuple[str, float], ...] = ()
    """(scorer, weight): each score is made an advantage of its own, and the advantages are summed.
    Without any, the rewards are compared, which are weighted sums of scores."""
    max_failed: float = 0.5
    """Largest share of a group's samples that may be without a reward."""

    def of(
        self, rewards: Sequence[float | None], parts: Mapping[str, Sequence[float | None]]
    ) -> tuple[float, ...]:
        """Return the advantages of a group, from its rewards and the scores that make them up.

        A sample without a reward counts in no mean; its advantage is 0, as are all of a group that
        is dropped (`why_dropped`).
        """
        known = [] if self.why_dropped(rewards) else with_reward(rewards)
        found: Iterator[float] = iter(())
        if known:
            picked = {name: _picked(scores, known) for name, scores in parts.items()}
            found = iter(self._of(_picked(rewards, known), picked))
        return tuple(next(found) if sample in known else 0.0 for sample in range(len(rewards)))

    def why_dropped(self, rewards: Sequence[float | None]) -> str | None:
        """Return why a group is dropped, None if enough samples, two at least, have a reward."""
        num = len(rewards)
        failed = num - len(with_reward(rewards))
        if failed and (failed > self.max_failed * num or num - failed < 2):
            return f"{failed} of {num} samples could not be scored"
        return None

    def _of(
        self, rewards: Sequence[float], parts: Mapping[str, Sequence[float]]
    ) -> tuple[float, ...]:
        if self.std == "batch":
            return centred(rewards)
        if not self.weights:
            return group_advantages(rewards)
        columns = [
            [weight * value for value in group_advantages(parts[name])]
            for name, weight in self.weights
        ]
        return tuple(math.fsum(values) for values in zip(*columns, strict=True))
