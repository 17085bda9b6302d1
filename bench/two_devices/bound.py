"""The least time of a batch on devices that may each generate and train in any mixture."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds per sample that one device takes; infinite for what it cannot do."""

    generate: float = math.inf
    train: float = math.inf


def least_seconds(speeds: Sequence[Speed], samples: int) -> float:
    """Returns the seconds if no device is ever idle and nothing else is paid for.

    A linear program with two tasks. By comparative advantage, some device divides the others:
    those better at generating generate, those better at training train, and it does both, for
    such a share of its time that both tasks end together. Infinite if nobody can do one of them.
    """
    ordered = sorted(speeds, key=_advantage, reverse=True)
    for index, mixed in enumerate(ordered):
        generates = sum(1 / speed.generate for speed in ordered[:index])
        trains = sum(1 / speed.train for speed in ordered[index + 1 :])
        both, either = 1 / mixed.generate, 1 / mixed.train
        # generates + share both = trains + (1 - share) either: both tasks have equal sizes.
        if both + either == 0:
            continue
        share = (trains + either - generates) / (both + either)
        if share <= 1:
            rate = min(generates + max(share, 0.0) * both, trains + (1 - max(share, 0.0)) * either)
            return samples / rate if rate else math.inf
    return math.inf


def _advantage(speed: Speed) -> float:
    """Returns generation over training speed."""
    if math.isinf(speed.train):
        return math.inf
    return speed.train / speed.generate


def fastest(measured: Sequence[Mapping[str, Speed]]) -> dict[str, Speed]:
    """Returns each device's best speeds, task by task: nothing measured beats their bound."""
    devices = {device for speeds in measured for device in speeds}
    return {
        device: Speed(
            generate=min(speeds[device].generate for speeds in measured if device in speeds),
            train=min(speeds[device].train for speeds in measured if device in speeds),
        )
        for device in sorted(devices)
    }
