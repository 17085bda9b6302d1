"""Speeds of devices, by which nothing is measured that beats their bound."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds per sample that one device takes; infinite for what it cannot do."""

    generate: float = math.inf
    train: float = math.inf

    @property
    def rates(self) -> tuple[float, float]:
        """Samples per second that it generates, and that it trains."""
        return 1 / self.generate, 1 / self.train


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
