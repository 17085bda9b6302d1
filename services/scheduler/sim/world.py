"""Virtual time, and processes in it."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

Action = Callable[[], None]


@dataclass(slots=True)
class World:
    """An agenda of actions in the order of their times, then of their making."""

    now: float = 0.0
    _agenda: list[tuple[float, int, Action]] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def after(self, seconds: float, action: Action) -> None:
        """Act later."""
        heapq.heappush(self._agenda, (self.now + seconds, next(self._numbers), action))

    def run(self, until: float, done: Callable[[], bool]) -> bool:
        """Act until ``done``; False if the time or the agenda ran out before."""
        while self._agenda and self._agenda[0][0] <= until:
            if done():
                return True
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        return done()
