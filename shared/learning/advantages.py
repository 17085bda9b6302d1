"""From rewards to advantages: how much better a sample is than the others of its group (GRPO)."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

EPSILON = 1e-4

AdvantageScope = Literal["group", "batch"]

SampleScores = tuple[Sequence[float | None], Mapping[str, Sequence[float | None]]]
"""Rewards of a group's samples, and the scores that make them up by the names of their scorers."""


def group_advantages(rewards: Sequence[float], *, std: float | None = None) -> tuple[float, ...]:
    """(reward - mean) / (std + 1e-4), with the population standard deviation of the group.

    Equal rewards carry no signal: their advantages are exactly 0, without rounding errors. ``std``
    replaces the group's own, for normalisation over a whole batch (`population_std`).

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
    best, half the worst. Among equal samples, later ones count as better.

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
    """Returns the factor from centred advantages to those over the standard deviation of the whole
    batch, which is known last; 1 if no sample has a reward, and so every advantage is 0."""
    return 1 / (population_std(rewards) + EPSILON) if rewards else 1.0


def with_reward(rewards: Sequence[float | None]) -> list[int]:
    """Return the samples that could be scored."""
    return [sample for sample, reward in enumerate(rewards) if reward is not None]


def _picked(values: Sequence[float | None], samples: Sequence[int]) -> list[float]:
    picked = [values[sample] for sample in samples]
    return [value for value in picked if value is not None]


@dataclass(frozen=True, slots=True)
class Advantages:
    """Compares the samples of a group."""

    std: AdvantageScope = "group"
    """batch: they are only centred here; `of_batch` scales them once all rewards are known."""
    weights: tuple[tuple[str, float], ...] = ()
    """(scorer, weight): each score is made an advantage of its own, and the advantages are summed
    by weight. Without any, the rewards are compared, which are weighted sums of scores."""
    max_failed: float = 0.5
    """Largest share of a group's samples that may be without a reward."""

    def for_group(
        self, rewards: Sequence[float | None], parts: Mapping[str, Sequence[float | None]]
    ) -> tuple[float, ...]:
        """Return the advantages of a group, from its rewards and the scores that make them up.

        A sample without a reward counts in no mean; its advantage is 0, as are all of a group that
        is dropped (`why_dropped`).
        """
        return self._known(rewards, parts, self._of)

    def for_batch(self, groups: Sequence[SampleScores]) -> list[tuple[float, ...]]:
        """Return the advantages of a whole batch's groups, over the standard deviations of all of
        its rewards, or of all scores of each scorer, ignoring `std`."""
        groups_with_rewards = [(rewards, parts, with_reward(rewards)) for rewards, parts in groups]
        columns = [
            (
                weight,
                [
                    value
                    for _, parts, among in groups_with_rewards
                    for value in _picked(parts[name], among)
                ],
            )
            for name, weight in self.weights
        ] or [
            (
                1.0,
                [
                    value
                    for rewards, _, among in groups_with_rewards
                    for value in _picked(rewards, among)
                ],
            )
        ]
        scales = [weight * batch_scale(values) for weight, values in columns]

        def of(rewards: Sequence[float], parts: Mapping[str, Sequence[float]]) -> Iterable[float]:
            compared = [parts[name] for name, _ in self.weights] or [rewards]
            centred_ones = zip(*map(centred, compared), strict=True)
            return (_weighted(scales, values) for values in centred_ones)

        return [self._known(*scored, of) for scored in groups]

    def _known(
        self,
        rewards: Sequence[float | None],
        parts: Mapping[str, Sequence[float | None]],
        compute: Callable[[Sequence[float], Mapping[str, Sequence[float]]], Iterable[float]],
    ) -> tuple[float, ...]:
        """Return the result of ``compute`` for the counted samples, and 0 for the others."""
        samples = [] if self.why_dropped(rewards) else with_reward(rewards)
        advantages: Iterator[float] = iter(())
        if samples:
            picked = {name: _picked(scores, samples) for name, scores in parts.items()}
            advantages = iter(compute(_picked(rewards, samples), picked))
        return tuple(
            next(advantages) if sample in samples else 0.0 for sample in range(len(rewards))
        )

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
        weights = [weight for _, weight in self.weights]
        columns = [group_advantages(parts[name]) for name, _ in self.weights]
        return tuple(_weighted(weights, values) for values in zip(*columns, strict=True))


def _weighted(weights: Sequence[float], values: Sequence[float]) -> float:
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True))
