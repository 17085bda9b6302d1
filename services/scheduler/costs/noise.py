"""Draws how much longer or shorter work takes than on average, for each device, from a seed.

The simulator and the emulated cluster draw from the same places: a device's n-th piece of work
takes equally long in both, so that what differs between them is not chance.
"""

from dataclasses import dataclass, field
from random import Random

from shared.learning.seeds import derive

MIN_FACTOR = 0.1
"""No work takes less than a tenth of its mean."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Draws the factors of all devices of a run."""

    spread: float = 0.0
    """Ratio of the standard deviation to the mean."""
    seed: int = 0
    _drawn: dict[str, Random] = field(default_factory=dict)

    def factor(self, device: str) -> float:
        """Return the factor on the mean for the next piece of the device's work."""
        if not self.spread:
            return 1.0
        if device not in self._drawn:
            self._drawn[device] = Random(derive(self.seed, "device", device))
        return max(MIN_FACTOR, self._drawn[device].gauss(1.0, self.spread))


def rollout_device(kind: str, number: int) -> str:
    """Name a device by its ``number`` among the rollout devices of its kind."""
    return f"{kind}-{number}"
