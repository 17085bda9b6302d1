"""Emulated devices: each is held for the seconds that its work takes, divided by the scale.

A sleep ends late, by a tenth of a millisecond or by several on a busy machine, or half a
millisecond early. What a device slept too long is taken off the work that follows at once, as a
real device would not have lost it, and what it slept too little is added; after a pause it is
forgotten.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.runner.figures import Interval, Use
from services.scheduler.costs.noise import Noise

AT_ONCE_S = 0.005
"""Work that follows within this time follows at once."""


@dataclass(slots=True)
class Held:
    name: str
    scale: float
    noise: Noise = field(default_factory=Noise)
    drawn_as: str = ""
    """Its name in `noise`."""
    intervals: list[Interval] = field(default_factory=list)
    overshoot: list[float] = field(default_factory=list)
    """Seconds that each sleep was too long."""
    clock: Callable[[], float] = lambda: time.monotonic()
    overhead_s: float = 0.0
    """Seconds of the device, at full scale, that tasks other than its work took; its next work
    takes as much longer."""
    _owed: float = 0.0
    """Seconds of the work before that are to be taken off the next."""
    _free_at: float = 0.0
    _busy: bool = False

    def drawn(self, seconds: float) -> float:
        """Draws what the device's next work takes, which takes so many seconds on average."""
        return seconds * self.noise.factor(self.drawn_as)

    async def hold(self, seconds: float, use: Use, *, samples: float = 0.0) -> float:
        """Is busy for so many real seconds over the scale; returns the seconds it was, scaled.

        Raises:
            RuntimeError: if the device is busy with something else.
        """
        if self._busy:
            raise RuntimeError(f"{self.name} is asked to {use} while it is busy")
        self._busy = True
        begin = self.clock()
        taken, self.overhead_s = self.overhead_s, 0.0
        wanted = (seconds + taken) / self.scale
        owed = self._owed if begin - self._free_at < AT_ONCE_S else 0.0
        is_done = False
        try:
            await asyncio.sleep(max(0.0, wanted - owed))
            is_done = True
        finally:  # work that is cut off counts as far as it went
            self._busy = False
            self._free_at = self.clock()
            spent = self._free_at - begin + owed
            done = samples if is_done else samples * min(1.0, spent / wanted)
            self.intervals.append(Interval(self.name, use, begin, self._free_at, done))
        self._owed = spent - wanted
        self.overshoot.append(max(0.0, self._owed))
        return wanted


@dataclass(slots=True)
class QueuedHeld(Held):
    """A device of which several things may be asked at a time: it does one after the other."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def hold(self, seconds: float, use: Use, *, samples: float = 0.0) -> float:
        async with self.turn:
            return await Held.hold(self, seconds, use, samples=samples)


@dataclass(frozen=True, slots=True)
class Overshoot:
    """How much too long an emulation slept, in milliseconds."""

    median_ms: float
    p99_ms: float
    sleeps: int


def overshoot(devices: Sequence[Held]) -> Overshoot:
    values = sorted(1000 * value for device in devices for value in device.overshoot)
    if not values:
        return Overshoot(0.0, 0.0, 0)
    return Overshoot(
        values[len(values) // 2], values[min(len(values) - 1, len(values) * 99 // 100)], len(values)
    )
