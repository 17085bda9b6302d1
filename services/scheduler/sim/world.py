"""Virtual time, and processes in it."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

Action = Callable[[], None]


@dataclass(slots=True)
class Process:
    """Something that acts in time. A new life forgets what the one before had planned."""

    world: "World" = field(repr=False)
    name: str
    life: int = 0
    alive: bool = True

    def after(self, seconds: float, action: Action) -> None:
        """Act later, if this life lasts."""
        life = self.life

        def act() -> None:
            if self.alive and self.life == life:
                action()

        self.world.at(self.world.now + seconds, act)

    def kill(self) -> None:
        self.alive = False
        self.life += 1


@dataclass(slots=True)
class World:
    """An agenda of actions in the order of their times, then of their making."""

    seed: int = 0
    now: float = 0.0
    random: Random = field(init=False)
    _agenda: list[tuple[float, int, Action]] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)

    def at(self, time: float, action: Action) -> None:
        heapq.heappush(self._agenda, (time, next(self._numbers), action))

    def run(self, until: float, done: Callable[[], bool]) -> bool:
        """Act until ``done``; False if the time or the agenda ran out before."""
        while self._agenda and self._agenda[0][0] <= until:
            if done():
                return True
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        return done()
