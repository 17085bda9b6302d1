"""How long the turns of an event loop take, and what they spend it on.

On a busy machine a turn is also as long as the machine made it wait, so beside its seconds stand
the CPU seconds of its thread. The interpreter runs one thread at a time: what others compute
meanwhile lengthens a turn as well, and a collection of garbage stops all of them.
"""

import asyncio
import contextlib
import gc
import heapq
import time
from asyncio.events import Handle
from collections.abc import Iterator
from dataclasses import dataclass, field

LONG_S = 0.25
"""Seconds from which a turn counts as long."""
KEPT = 5
"""Longest turns that are described."""


@dataclass(frozen=True, slots=True, order=True)
class Turn:
    seconds: float
    cpu_seconds: float
    """CPU seconds of the loop's thread."""
    collected_seconds: float
    """Seconds of it in which garbage was collected, by whichever thread."""
    what: str


@dataclass(slots=True)
class Turns:
    """All turns of a loop; where they are counted, the longest are kept."""

    count: int = 0
    over: int = 0
    """Turns of more than `LONG_S`."""
    cpu_over: int = 0
    """Turns of more than `LONG_S` of CPU."""
    longest_cpu: float = 0.0
    longest: list[Turn] = field(default_factory=list)
    """A heap of the `KEPT` longest."""
    collections: int = 0
    collected: float = 0.0
    """Seconds of all collections of garbage."""
    longest_collection: float = 0.0
    generations: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Number and seconds of the collections of each generation."""
    _collecting: float = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Time every turn of the loops in the block."""
        original = Handle._run

        def run(handle: Handle) -> None:
            began, cpu, collected = time.monotonic(), time.thread_time(), self.collected
            what = handle._callback  # type: ignore[attr-defined]  # gone once it has run
            original(handle)
            seconds = time.monotonic() - began
            if seconds > 0.01:
                cpu = time.thread_time() - cpu
                self._note(Turn(seconds, cpu, self.collected - collected, described(what)))
            self.count += 1

        Handle._run = run  # type: ignore[method-assign,assignment]
        gc.callbacks.append(self._collect)
        try:
            yield
        finally:
            gc.callbacks.remove(self._collect)
            Handle._run = original  # type: ignore[method-assign]

    def _note(self, turn: Turn) -> None:
        self.over += turn.seconds > LONG_S
        self.cpu_over += turn.cpu_seconds > LONG_S
        self.longest_cpu = max(self.longest_cpu, turn.cpu_seconds)
        add = heapq.heappush if len(self.longest) < KEPT else heapq.heappushpop
        add(self.longest, turn)

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        now = time.monotonic()
        if phase == "start":
            self._collecting = now
            return
        seconds = now - self._collecting
        self.collections += 1
        self.collected += seconds
        self.longest_collection = max(self.longest_collection, seconds)
        number, total = self.generations.get(info["generation"], (0, 0.0))
        self.generations[info["generation"]] = number + 1, total + seconds


def described(callback: object) -> str:
    """Name what a turn has run: a coroutine by where it stands, or a function."""
    task = getattr(callback, "__self__", None)
    coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
    if coroutine is None:
        return str(getattr(callback, "__qualname__", callback))[:120]
    names = list[str]()
    while coroutine is not None and len(names) < 6:
        names.append(getattr(coroutine, "__qualname__", str(coroutine))[:60])
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return " > ".join(names)
