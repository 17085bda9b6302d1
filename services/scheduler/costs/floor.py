"""Bounds that no schedule beats: all work is done, no device is idle, and nothing else costs.

Training is charged as passes of whole groups, even if they do not fit a device, and without launch
overhead of the host.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import accumulate

from services.scheduler.costs.profile import Profile
from services.scheduler.costs.seconds import generation_work, speed, training_work

Rates = tuple[float, float]
"""Samples per second that a device generates if it does no other work, and groups that it
trains."""


def floor_seconds(profile: Profile, devices: Mapping[str, int]) -> float:
    """Return the least time of a batch if every device may generate and train in any mixture.

    For equal devices the floor is all work over their number. Infinite if a task has no device.
    """
    rates = [
        (count * speed(profile, kind, "rollout"), count * speed(profile, kind, "trainer"))
        for kind, count in devices.items()
    ]
    return least_seconds(rates, generation_work(profile), training_work(profile))


def least_seconds(rates: Iterable[Rates], generation: float, training: float) -> float:
    """Return the least time of two tasks on devices that may do both in any mixture.

    A linear program, solved by comparative advantage: devices in descending order of generation
    over training speed; those in front generate, those behind train, and one does both. Infinite if
    a task has no device.

    Args:
        rates: what each device generates per second if it does nothing else, and what it trains.
        generation: what is to be generated, in the unit of the rates.
        training: what is to be trained, in theirs.
    """
    able = sorted(filter(any, rates), key=_advantage, reverse=True)
    behind = [*accumulate((trains for _, trains in reversed(able)), initial=0.0)][::-1]
    front = 0.0
    for (generates, trains), rest in zip(able, behind[1:], strict=True):
        # Share of this device's time that it generates, for both tasks to end together.
        weight = training * generates + generation * trains
        share = (generation * (trains + rest) - training * front) / weight
        if share <= 1:
            share = max(share, 0.0)
            return max(
                _ratio(generation, front + share * generates),
                _ratio(training, (1 - share) * trains + rest),
            )
        front += generates
    return math.inf


def _advantage(rates: Rates) -> float:
    return _ratio(*rates)


def _ratio(amount: float, rate: float) -> float:
    return amount / rate if rate else math.inf
