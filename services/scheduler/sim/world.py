"""Virtual time, and processes that can be killed, paused and cut off in it."""

import heapq
import itertools
from collections import deque
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
    paused_until: float = 0.0
    cut_off_until: float = 0.0
    outbox: deque[Callable[[], object]] = field(default_factory=deque, repr=False)
    """What it has sent while it was cut off."""

    @property
    def is_cut_off(self) -> bool:
        return self.cut_off_until > self.world.now

    def after(self, seconds: float, action: Action) -> None:
        """Act later, if this life lasts; a paused process acts when it goes on."""
        life = self.life

        def act() -> None:
            if not self.alive or self.life != life:
                return
            if self.world.now < self.paused_until:
                self.world.at(self.paused_until, act)
            else:
                action()

        self.world.at(self.world.now + seconds, act)

    def kill(self) -> None:
        self.alive = False
        self.life += 1

    def pause(self, seconds: float) -> None:
        """Stop and go on, as by SIGSTOP and SIGCONT: what comes meanwhile is handled afterwards."""
        self.paused_until = max(self.paused_until, self.world.now + seconds)

    def cut_off(self, seconds: float) -> None:
        """Part it from the broker: messages wait on both sides, and statuses are lost."""
        self.cut_off_until = max(self.cut_off_until, self.world.now + seconds)

    def heal(self) -> None:
        self.paused_until = self.cut_off_until = self.world.now


@dataclass(slots=True)
class World:
    """An agenda of actions in the order of their times, then of their making."""

    seed: int = 0
    now: float = 0.0
    random: Random = field(init=False)
    num_actions: int = 0
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
            self.num_actions += 1
            action()
        return done()
