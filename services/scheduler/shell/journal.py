"""Writes the run's journal, over outages of the store."""

import asyncio
from dataclasses import dataclass, field
from functools import partial

import structlog

from services.scheduler.shell.housekeeping import retry
from shared.run.journal import (
    Alarm,
    Entry,
    PhaseChange,
    Request,
    entry_key,
    newest_number,
    read_newest,
)
from shared.store import ObjectStore

SAID_S = 1.0
"""Seconds for which an answer to a request waits until the journal has it."""
LOOKED_BACK = 256
"""Newest entries among which the last change of the phase is looked for."""
MAX_WAITING = 10_000
"""Entries that wait while the store does not answer; further ones are only logged."""

log = structlog.get_logger()


@dataclass(slots=True)
class Journal:
    """Writes entries in the order in which they are given, over outages of the store."""

    _store: ObjectStore
    _run: str
    _phase: str | None = None
    """The newest phase that was written, or waits to be."""
    _firing: dict[str, bool] = field(default_factory=dict)
    _waiting: "asyncio.Queue[tuple[Entry, asyncio.Event]]" = field(default_factory=asyncio.Queue)
    _is_known: bool = False
    """Whether it is known what was written before."""
    _before: tuple[str, str | None] | None = None
    """Phase and failure that were noted before that."""

    async def write(self) -> None:
        """Write what is given, for ever; first find out where the journal ends."""
        number = await retry(partial(newest_number, self._store, self._run))
        await retry(partial(self._look_back, number))
        self._is_known = True
        if self._before is not None:
            self.changed(*self._before)
        while True:
            entry, done = await self._waiting.get()
            data = entry.model_dump_json(exclude_none=True).encode()
            is_stored = False
            while not is_stored:  # another scheduler has written one as well
                number += 1
                is_stored = await retry(partial(self._create, number, data))
            done.set()

    async def _create(self, number: int, data: bytes) -> bool:
        """Store an entry; return whether the one of this number is this one."""
        key = entry_key(self._run, number)
        return await self._store.create(key, data) or await self._store.read(key) == data

    async def _look_back(self, newest: int) -> None:
        seen: dict[str, bool] = {}
        async for number, entry in read_newest(self._store, self._run, newest + 1):
            if isinstance(entry, Alarm):
                seen.setdefault(entry.what, entry.firing)
            if isinstance(entry, PhaseChange) or number < newest - LOOKED_BACK:
                self._phase = entry.phase if isinstance(entry, PhaseChange) else None
                break
        self._firing = seen

    def changed(self, phase: str, failure: str | None) -> None:
        """Note the phase, if it is another one than was noted last, by whichever scheduler."""
        if not self._is_known:
            self._before = phase, failure
        elif phase != self._phase:
            before, self._phase = self._phase, phase
            self._put(PhaseChange(before=before, phase=phase, failure=failure))

    def alarm(self, what: str, reason: str) -> None:
        """Note an alarm that begins or ends; not that one goes on."""
        firing = bool(reason)
        if self._is_known and firing != self._firing.get(what, False):
            self._firing[what] = firing
            self._put(Alarm(what=what, firing=firing, reason=reason or None))

    async def asked(self, request: Request) -> None:
        """Note a request; return once it is stored, or a moment later if the store is silent."""
        done = self._put(request)
        try:
            async with asyncio.timeout(SAID_S):
                await done.wait()
        except TimeoutError:
            log.warning("journal_late", operation=request.operation)

    def _put(self, entry: Entry) -> asyncio.Event:
        done = asyncio.Event()
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put_nowait((entry, done))
        else:
            log.error("journal_entry_not_kept", entry=entry.model_dump())
        return done
