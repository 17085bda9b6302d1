"""Bounds that no schedule beats: all work is done, no device is idle, and nothing else costs."""

import math
from collections.abc import Mapping

from services.scheduler.costs.profile import Profile, Role, speed


def floor_seconds(profile: Profile, devices: Mapping[str, int]) -> float:
    """Return the least time of a batch if every device may generate and train in any mixture.

    A linear program with two tasks, solved by comparative advantage: kinds in descending order of
    generation over training speed; those in front generate, those behind train, and one kind does
    both. Of equal devices it is all work over their number. Infinite if a task has no device.
    """
    rates = [
        (count * speed(profile, kind, "rollout"), count * speed(profile, kind, "trainer"))
        for kind, count in devices.items()
    ]
    able = sorted(filter(any, rates), key=_advantage, reverse=True)
    generation, training = profile.generation_work, profile.training_work
    for index, (generates, trains) in enumerate(able):
        front = sum(rate for rate, _ in able[:index])
        behind = sum(rate for _, rate in able[index + 1 :])
        # Share of this kind's time that it generates, for both tasks to end together.
        weight = training * generates + generation * trains
        share = (generation * (trains + behind) - training * front) / weight
        if share <= 1:
            share = max(share, 0.0)
            return max(
                _ratio(generation, front + share * generates),
                _ratio(training, (1 - share) * trains + behind),
            )
    return math.inf


def split_bound(profile: Profile, rollout: Mapping[str, int], trainer: Mapping[str, int]) -> float:
    """Return the least time of a batch if devices are split for good and none is lent."""
    return max(
        _ratio(profile.generation_work, _total(profile, rollout, "rollout")),
        _ratio(profile.training_work, _total(profile, trainer, "trainer")),
    )


def _total(profile: Profile, devices: Mapping[str, int], role: Role) -> float:
    return sum(count * speed(profile, kind, role) for kind, count in devices.items())


def _advantage(rates: tuple[float, float]) -> float:
    return _ratio(*rates)


def _ratio(amount: float, rate: float) -> float:
    return amount / rate if rate else math.inf
