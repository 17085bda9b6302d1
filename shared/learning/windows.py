"""First step of a group's window of trained steps: drawn at random, or moved batch by batch.

MixGRPO (Li et al. 2025) moves the window from the first steps, which decide the content of an
image, to the last steps. After the last position it stays, or returns to the first one.
"""

from dataclasses import dataclass
from typing import Literal

from shared.learning.seeds import derive

WindowRule = Literal["group", "random", "progressive", "decay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """A window starts at a step of the noise schedule from ``first`` to ``last``."""

    first: int
    last: int
    rule: WindowRule = "group"
    """group: drawn for each group. random: drawn once for ``batches`` batches and all their groups.
    progressive: ``batches`` batches at each position. decay: ``batches`` at the first position,
    then fewer, and ``batches_at_last`` at the last."""
    stride: int = 1
    """Steps from one position to the next."""
    batches: int = 1
    batches_at_last: int = 1
    rolls_back: bool = False
    """Whether the window returns to the first position after the last; otherwise it stays."""

    def start(self, seed: int, batch: int, group: int) -> int:
        """Returns the first trained step of a group's window; drawn steps are uniform."""
        if self.rule == "group":
            drawn = derive(seed, "window", batch, group)
        elif self.rule == "random":
            drawn = derive(seed, "windows", batch // self.batches)
        else:
            return self._position(batch)
        return self.first + drawn % (self.last - self.first + 1)

    def _position(self, batch: int) -> int:
        starts: list[int] = [*range(self.first, self.last, self.stride), self.last]
        durations = [self._num_batches(index, len(starts)) for index in range(len(starts))]
        remaining = batch % sum(durations) if self.rolls_back else batch
        for start, duration in zip(starts, durations, strict=True):
            remaining -= duration
            if remaining < 0:
                return start
        return self.last

    def _num_batches(self, index: int, num_positions: int) -> int:
        """Return the number of batches at a position."""
        if self.rule == "progressive" or num_positions == 1:
            return self.batches
        reduction = (self.batches - self.batches_at_last) * index / (num_positions - 1)
        return self.batches - int(reduction + 0.5)
