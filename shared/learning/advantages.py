"""From rewards to advantages: how much better a sample is than the others of its group (GRPO)."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

EPSILON = 1e-4

AdvantageScope = Literal["group", "batch"]

SampleScores = tuple[Sequence[float | None], Mapping[str, Sequence[float | None]]]
"""Rewards of the samples of a group, and the scores of each scorer by its name."""


def group_advantages(rewards: Sequence[float], *, std: float | None = None) -> tuple[float, ...]:
    """(reward - mean) / (std + 1e-4), with the population standard deviation of the group.

    Equal rewards have advantages of exactly 0, without rounding errors. ``std`` replaces the
    group's standard deviation, for example by a batch's.

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
    """Return the indices of the ``number`` samples that are trained: half are the best samples of
    the group, half are the worst. If advantages are equal, the later sample counts as better.

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
    """Return the factor that divides centred rewards by the standard deviation of a batch.

    The factor is 1 if no sample has a reward."""
    return 1 / (population_std(rewards) + EPSILON) if rewards else 1.0


def with_reward(rewards: Sequence[float | None]) -> list[int]:
    """Return the indices of the samples with a reward."""
    return [sample for sample, reward in enumerate(rewards) if reward is not None]


def _picked(values: Sequence[float | None], samples: Sequence[int]) -> list[float]:
    picked = [values[sample] for sample in samples]
    return [value for value in picked if value is not None]


@dataclass(frozen=True, slots=True)
class Advantages:
    """Compares the samples of a group."""

    std: AdvantageScope = "group"
    """batch: `for_group` only centres the rewards; `for_batch` also scales them."""
    weights: tuple[tuple[str, float], ...] = ()
    """(scorer, weight): the advantage is the weighted sum of the advantages of each scorer. If
    empty, advantages are computed from the rewards, which are weighted sums of scores."""
    max_failed: float = 0.5
    """Largest share of a group's samples that may be without a reward."""

    def for_group(
        self, rewards: Sequence[float | None], parts: Mapping[str, Sequence[float | None]]
    ) -> tuple[float, ...]:
        """Return the advantages of a group, from its rewards and its scores by scorer.

        Samples without a reward are not part of the means, and have an advantage of 0. If the group
        is dropped (`why_dropped`), all advantages are 0.
        """
        return self._fill(rewards, parts, self._within_group)

    def for_batch(self, groups: Sequence[SampleScores]) -> list[tuple[float, ...]]:
        """Return the advantages of all groups of a batch, ignoring `std`.

        Centred rewards are divided by the standard deviation of all rewards of the batch. With
        `weights`, the same applies to the scores of each scorer."""
        groups_with_rewards = [(rewards, parts, with_reward(rewards)) for rewards, parts in groups]
        columns = [
            (
                weight,
                [
                    value
                    for _, parts, samples in groups_with_rewards
                    for value in _picked(parts[name], samples)
                ],
            )
            for name, weight in self.weights
        ] or [
            (
                1.0,
                [
                    value
                    for rewards, _, samples in groups_with_rewards
                    for value in _picked(rewards, samples)
                ],
            )
        ]
        scales = [weight * batch_scale(values) for weight, values in columns]

        def scaled(
            rewards: Sequence[float], parts: Mapping[str, Sequence[float]]
        ) -> Iterable[float]:
            compared = [parts[name] for name, _ in self.weights] or [rewards]
            columns = zip(*map(centred, compared), strict=True)
            return (_weighted(scales, values) for values in columns)

        return [self._fill(*scored, scaled) for scored in groups]

    def _fill(
        self,
        rewards: Sequence[float | None],
        parts: Mapping[str, Sequence[float | None]],
        compute: Callable[[Sequence[float], Mapping[str, Sequence[float]]], Iterable[float]],
    ) -> tuple[float, ...]:
        """Return the result of ``compute`` for samples with a reward, and 0 for other samples."""
        samples = [] if self.why_dropped(rewards) else with_reward(rewards)
        advantages: Iterator[float] = iter(())
        if samples:
            picked = {name: _picked(scores, samples) for name, scores in parts.items()}
            advantages = iter(compute(_picked(rewards, samples), picked))
        return tuple(
            next(advantages) if sample in samples else 0.0 for sample in range(len(rewards))
        )

    def why_dropped(self, rewards: Sequence[float | None]) -> str | None:
        """Return why a group is dropped; None if enough samples (at least two) have a reward."""
        num = len(rewards)
        failed = num - len(with_reward(rewards))
        if failed and (failed > self.max_failed * num or num - failed < 2):
            return f"{failed} of {num} samples could not be scored"
        return None

    def _within_group(
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
