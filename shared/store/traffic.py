"""Counts the bytes that a process stores and reads, and the seconds in which it does.

Seconds in which several objects are under way count once, so that bytes per second are the line's.
"""

import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from shared.store.backend import PIECE
from shared.telemetry import ROUND_TRIP_SECONDS, TRANSFER_SECONDS, TRANSFERRED_BYTES

MIN_BYTES, MIN_SECONDS = 1 << 20, 1.0
"""A smaller and faster transfer measures the round trip, not the line."""
NUM_NEWEST = 16
"""Transfers, each of this size or time, that the present rate is taken of."""

MIN_RATE_S, MIN_RATE_BYTES, MAX_RATE_S = 1.0, 2 * PIECE, 10.0
"""A source has to show its rate within this time, or on a very slow line within these bytes, but
then within the longest time."""
STARTING = 0.5
"""Share of a rate that is enough from a source whose line starts, or whose rate is an old one."""


@dataclass(slots=True)
class Pace:
    """Counts what a source gives, from its first byte on, and in how much time."""

    num_bytes: int = 0
    seconds: float = 0.0
    share: float = STARTING
    """Needed share of the least rate."""

    def add(self, num_bytes: int, seconds: float) -> bool:
        """Return whether the rate is to be checked."""
        self.seconds = self.seconds + seconds if self.num_bytes or not num_bytes else 0.0
        self.num_bytes += num_bytes
        return self.seconds >= MIN_RATE_S

    def is_slow(self, min_rate: float) -> bool:
        """Return whether the rate was less, and begin a new count where that can be known."""
        needed, num_bytes = min_rate * self.seconds * self.share, self.num_bytes
        if needed < MIN_RATE_BYTES and self.seconds < MAX_RATE_S:
            return False
        self.num_bytes, self.seconds, self.share = 0, 0.0, 1.0
        return num_bytes <= needed


@dataclass(slots=True)
class Meter:
    """Counts the transfers in one direction."""

    direction: str = ""
    """Label in metrics; empty for transfers that another meter counts there."""
    num_bytes: int = 0
    seconds: float = 0.0
    quickest: float = math.inf
    """Seconds of the quickest transfer: about a round trip, once any was small."""
    _new_bytes: int = 0
    _new_seconds: float = 0.0
    _num_open: int = 0
    _noted_at: float = 0.0
    _newest: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=NUM_NEWEST))

    @property
    def rate(self) -> float | None:
        """Bytes per second of the newest transfers; None before the first."""
        num_bytes, seconds = (sum(each) for each in zip((0, 0.0), *self._newest, strict=True))
        return num_bytes / seconds if seconds else None

    @contextmanager
    def transfer(self, size: int) -> Iterator[None]:
        """Count a transfer. One that is cancelled counts as whole: the line is no faster. One that
        fails does not count."""
        self._note(1)
        began = self._noted_at
        try:
            yield
        except Exception:
            self._note(-1)
            self._new_bytes, self._new_seconds = 0, 0.0
            raise
        except BaseException:
            self._end(size)
            raise
        self._end(size)
        if size:
            self.quickest = min(self.quickest, max(0.0, self._noted_at - began))
            if self.direction:
                ROUND_TRIP_SECONDS.labels(direction=self.direction).set(self.quickest)

    async def counted(self, chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """Yield chunks, and count them as they arrive."""
        async with aclosing(chunks):
            while True:
                with self.transfer(0):
                    chunk = await anext(chunks, b"")
                if not chunk:
                    return
                self._add(len(chunk))
                yield chunk

    def _end(self, size: int) -> None:
        self._note(-1)
        self._add(size)

    def _add(self, size: int) -> None:
        self._new_bytes += size
        if self._new_bytes and (self._new_bytes >= MIN_BYTES or self._new_seconds >= MIN_SECONDS):
            self.num_bytes += self._new_bytes
            self.seconds += self._new_seconds
            if self.direction:
                TRANSFERRED_BYTES.labels(direction=self.direction).inc(self._new_bytes)
                TRANSFER_SECONDS.labels(direction=self.direction).inc(self._new_seconds)
            self._newest.append((self._new_bytes, self._new_seconds))
            self._new_bytes, self._new_seconds = 0, 0.0

    def _note(self, change: int) -> None:
        now = time.monotonic()
        if self._num_open:
            self._new_seconds += max(0.0, now - self._noted_at)
        self._noted_at = now
        self._num_open += change


@dataclass(frozen=True, slots=True)
class Traffic:
    up: Meter = field(default_factory=lambda: Meter("up"))
    down: Meter = field(default_factory=lambda: Meter("down"))

    @property
    def round_trip(self) -> float | None:
        """Seconds of the quickest transfer; None before the first."""
        quickest = min(self.up.quickest, self.down.quickest)
        return quickest if math.isfinite(quickest) else None
