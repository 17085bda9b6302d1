"""Ends a process whose work hangs, so that its supervisor restarts it.

A stuck call into a device leaves the rest of a process alive: it reports, and finishes nothing.
Others are given its work when its deadline has passed (`schedule.slot_deadline_s`). The process
itself ends, with status 70, when a piece of work takes longer than a hard deadline:

    DIGENRL_HANG_S, if it is set;
    or twice schedule.slot_deadline_s, if that is a number and the work is a slot's;
    or ten times the longest such work so far, two minutes at least; half an hour for the first

A thread looks once a second. Before that, /livez returns 503 and the worker's status has the
reason. Time in which the process was stopped does not count. An outage of the store or the broker
does not count for work that waits for them (weights that are loaded); a device that computes needs
neither, and hangs during an outage as at any other time.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from shared import limits
from shared.errors import Unavailable

EXIT_HUNG = 70
WARNING_SHARE = 0.5
"""Share of the deadline after which the process warns that it may hang."""
SLOT_WORK = frozenset({"generating", "decoding", "encoding", "scoring", "training"})
STORE_WORK = frozenset({"loading_weights"})
"""Work that waits for the store and the broker as well as for a device."""

log = structlog.get_logger()


@dataclass(slots=True)
class WorkInProgress:
    """Knows what a process is busy with, and since when; written by its loop, read by a thread."""

    hard_s: float | None = None
    """Deadline of any piece of work; None if it follows from those before."""
    slot_s: float | None = None
    """The same of work that has a slot, apart from weights that are loaded and optimizer steps."""
    longer_s: float = 0.0
    """Seconds that a piece of work may take longer than those before, and not hang."""
    now: float = 0.0
    """Seconds that this process has run, as the thread has counted them."""
    excused: float = 0.0
    """Seconds of them in which something outside may have been missing."""
    longest: dict[str, float] = field(default_factory=dict)
    """Kind of work -> longest time that one piece has taken."""
    _begun: dict[object, tuple[str, float]] = field(default_factory=dict)

    @contextmanager
    def running(self, kind: str) -> Iterator[None]:
        """Count this block as a piece of work of some kind."""
        token, began = object(), self._counted(kind)
        self._begun[token] = kind, began
        try:
            yield
        finally:
            del self._begun[token]
            seconds = self._counted(kind) - began
            self.longest[kind] = max(seconds, self.longest.get(kind, 0.0))

    def advance(self, seconds: float, *, outage: bool = False) -> None:
        """Let time pass in which this process ran. In an outage, what stores and brokers are
        needed for may have waited."""
        self.now += seconds
        if outage:
            self.excused += seconds

    def _counted(self, kind: str) -> float:
        """Return the seconds so far that count for this kind of work."""
        return self.now - (self.excused if kind in STORE_WORK else 0.0)

    def deadline(self, kind: str) -> float:
        chosen = self.hard_s or (self.slot_s if kind in SLOT_WORK else None)
        if chosen is not None:
            return chosen
        longest = self.longest.get(kind)
        usual = (
            limits.FIRST_DEADLINE_S
            if longest is None
            else max(limits.MIN_DEADLINE_S, limits.DEADLINE_FACTOR * longest)
        )
        return usual + self.longer_s / WARNING_SHARE

    def hangs(self, share: float = 1.0) -> str:
        """Return what takes longer than this share of its deadline, in words; empty if nothing."""
        for kind, began in list(self._begun.values()):
            seconds, deadline = self._counted(kind) - began, self.deadline(kind)
            if seconds > share * deadline:
                return (
                    f"{kind} has not ended for {seconds:.0f} s; this process ends itself after "
                    f"{deadline:.0f} s (DIGENRL_HANG_S)"
                )
        return ""


def _leave(reason: str) -> None:
    log.error("hung", reason=reason, status=EXIT_HUNG)
    sys.stderr.flush()
    os._exit(EXIT_HUNG)


@dataclass(slots=True)
class Watchdog:
    progress: WorkInProgress
    look_s: float = limits.HANG_CHECK_S
    leave: Callable[[str], None] = _leave

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(self.look_s)
            now = time.monotonic()
            self.look(now - last, outage=now - Unavailable.noticed_at < limits.OUTAGE_GRACE_S)
            last = now

    def look(self, seconds: float, *, outage: bool = False) -> None:
        """Look after some seconds; those beyond two looks were spent stopped."""
        self.progress.advance(min(seconds, 2 * self.look_s), outage=outage)
        reason = self.progress.hangs()
        if reason:
            self.leave(reason)
