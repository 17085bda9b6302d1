"""Where a group's window of trained steps begins: drawn, or moving over the run's batches.

MixGRPO (Li et al. 2025) moves the window from the first steps, which decide what an image shows,
to the last ones. After the last full window it begins again at the first, or stays there: it is
never empty.
"""

from dataclasses import dataclass
from typing import Literal

from shared.learning.seeds import derive

Moves = Literal["group", "random", "progressive", "decay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Starts are steps on the noise schedule, from ``first`` to ``last``."""

    first: int
    last: int
    moves: Moves = "group"
    """group: drawn for each group. random: drawn for each ``batches`` batches, the same for all
    groups. progressive: ``batches`` at each position. decay: fewer at each, down to
    ``batches_last``."""
    stride: int = 1
    """Steps from one position to the next."""
    batches: int = 1
    batches_last: int = 1
    rolls_back: bool = False
    """Whether a window that has been everywhere begins again; otherwise it stays at the last."""

    def start(self, seed: int, batch: int, group: int) -> int:
        """Returns the first trained step of a group's window; drawn ones are uniform."""
        if self.moves == "group":
            drawn = derive(seed, "window", batch, group)
        elif self.moves == "random":
            drawn = derive(seed, "windows", batch // self.batches)
        else:
            return self._position(batch)
        return self.first + drawn % (self.last - self.first + 1)

    def _position(self, batch: int) -> int:
        starts: list[int] = [*range(self.first, self.last, self.stride), self.last]
        stays = [self._stay(place, len(starts)) for place in range(len(starts))]
        left = batch % sum(stays) if self.rolls_back else batch
        for start, stay in zip(starts, stays, strict=True):
            left -= stay
            if left < 0:
                return start
        return self.last

    def _stay(self, place: int, num_places: int) -> int:
        """Return the number of batches at a position."""
        if self.moves == "progressive" or num_places == 1:
            return self.batches
        less = (self.batches - self.batches_last) * place / (num_places - 1)
        return self.batches - int(less + 0.5)
