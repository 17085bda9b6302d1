"""Counts the bytes that a process stores and reads, and the seconds in which it does.

Seconds in which several objects are under way count once, so that bytes per second are the line's.
"""

import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

MIN_BYTES, MIN_SECONDS = 1 << 20, 1.0
"""A smaller and faster transfer measures the round trip, not the line."""
NUM_NEWEST = 16
"""Transfers, each of this size or time, that the present rate is taken of."""


@dataclass(slots=True)
class Meter:
    """Counts the transfers in one direction."""

    num_bytes: int = 0
    seconds: float = 0.0
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
            self._newest.append((self._new_bytes, self._new_seconds))
            self._new_bytes, self._new_seconds = 0, 0.0

    def _note(self, change: int) -> None:
        now = time.monotonic()
        if self._num_open:
            self._new_seconds += now - self._noted_at
        self._noted_at = now
        self._num_open += change


@dataclass(frozen=True, slots=True)
class Traffic:
    up: Meter = field(default_factory=Meter)
    down: Meter = field(default_factory=Meter)
