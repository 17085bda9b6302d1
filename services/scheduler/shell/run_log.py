"""Appends the scheduler's entries to the run's log, over outages of the store."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from functools import partial

import structlog

from services.scheduler import limits
from services.scheduler.shell.api_letters import Letters
from services.scheduler.shell.housekeeping import retry
from shared.run.log import Log
from shared.run.log_entries import Alarm, DeadLetter, Entry, PhaseChange, Request
from shared.telemetry import DEAD_LETTERS_FOUND

log = structlog.get_logger()


@dataclass(slots=True)
class RunLog:
    """Appends entries in the order in which they are given."""

    _log: Log
    letters: Letters = field(default_factory=Letters)
    is_read: bool = False
    """Whether the entries of earlier schedulers have been read."""
    _phase: str | None = None
    """The newest phase that is in the log, or waits."""
    _firing: dict[str, bool] = field(default_factory=dict)
    _waiting: "asyncio.Queue[tuple[Entry, asyncio.Event]]" = field(default_factory=asyncio.Queue)
    _unread_phase: tuple[str, str | None] | None = None
    """Phase and failure that were given before the log was read."""

    async def write(self) -> None:
        """Append given entries, without end; first read the entries of other schedulers."""
        await retry(self._log.look)
        self.letters.read(self._log.numbered)
        if not self.is_read:
            self._read_state()
        interrupted = []
        try:
            while True:
                interrupted = [await self._waiting.get()]
                await self._keep(interrupted[0][0])
                interrupted[0][1].set()
        finally:
            await self._write_rest(interrupted)

    async def _write_rest(self, interrupted: "list[tuple[Entry, asyncio.Event]]") -> None:
        """Append what waits at the end, for a moment: the phase before letters, of which a failed
        run may have hundreds, and which their stream has as well."""
        rest = [self._waiting.get_nowait() for _ in range(self._waiting.qsize())]
        waiting = [each for each in [*interrupted, *rest] if not each[1].is_set()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.APPEND_WAIT_S):
                for entry, done in sorted(
                    waiting, key=lambda each: isinstance(each[0], DeadLetter)
                ):
                    await self._keep(entry)
                    done.set()

    def _read_state(self) -> None:
        for entry in self._log.entries:
            if isinstance(entry, Alarm):
                self._firing[entry.what] = entry.firing
            elif isinstance(entry, PhaseChange):
                self._phase = entry.phase
        self.is_read = True
        if self._unread_phase is not None:
            self.change_phase(*self._unread_phase)

    async def _keep(self, entry: Entry) -> None:
        if entry.fact in self._log.facts:
            return
        newest, is_letter = len(self._log.numbered), isinstance(entry, DeadLetter)
        if is_letter and len(self.letters.letters) >= limits.MAX_LETTERS:
            log.error("log_entry_not_kept", entry=entry.model_dump(exclude={"data"}))
            return
        number = await retry(partial(self.append, entry))
        if isinstance(entry, DeadLetter) and number > newest:
            DEAD_LETTERS_FOUND.inc()
            log.warning("dead_letter", number=number, kind=entry.kind, reason=entry.reason[:200])

    async def append(self, entry: Entry) -> int:
        """Append an entry now; return its number.

        Raises:
            Unavailable: if the store does not answer; repeat the call then.
        """
        number = await self._log.append(entry)
        self.letters.read(self._log.numbered)
        return number

    def change_phase(self, phase: str, failure: str | None) -> None:
        """Append the phase, if it differs from the newest one, whichever scheduler appended it."""
        if not self.is_read:
            self._unread_phase = phase, failure
        elif phase != self._phase:
            before, self._phase = self._phase, phase
            self.put(PhaseChange(before=before, phase=phase, failure=failure))

    def alarm(self, what: str, reason: str) -> None:
        """Append that an alarm begins or ends; not that it continues."""
        firing = bool(reason)
        if self.is_read and firing != self._firing.get(what, False):
            self._firing[what] = firing
            self.put(Alarm(what=what, firing=firing, reason=reason or None))

    async def request(self, request: Request) -> None:
        """Append a request; return once it is stored, or a moment later if the store is silent."""
        done = self.put(request)
        try:
            async with asyncio.timeout(limits.APPEND_WAIT_S):
                await done.wait()
        except TimeoutError:
            log.warning("log_entry_late", operation=request.operation)

    def put(self, entry: Entry) -> asyncio.Event:
        """Have an entry appended; the event is set once it is stored."""
        done = asyncio.Event()
        if self._waiting.qsize() < limits.MAX_WAITING_ENTRIES:
            self._waiting.put_nowait((entry, done))
        else:
            log.error("log_entry_not_kept", entry=entry.model_dump(exclude={"data"}))
        return done
