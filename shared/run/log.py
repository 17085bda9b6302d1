"""The logs of a run: what happened, in an order that every reader sees alike.

    <run>/log/<number>.json                 entries of the scheduler
    <run>/evaluations/log/<number>.json     entries of evaluators, which may not write the other

Entries are numbered from 1 without gaps. A writer appends one by exclusive create of the next
number, after it has read all entries before: an entry is never overwritten, a fact is never
appended twice, and a killed writer leaves an entry or none, also if several writers append.
Entries are kept as long as the run. Nothing of a run rests on them.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

import structlog
from pydantic import ValidationError

from shared.limits import FIRST_ENTRIES, MAX_CONCURRENT_ENTRIES
from shared.run.layout import evaluations_log_folder, log_folder
from shared.run.log_entries import ENTRY, Entry
from shared.store import ObjectStore

log = structlog.get_logger()


@dataclass(slots=True)
class Log:
    """Reads and appends the entries of one log, each of which it reads once."""

    store: ObjectStore
    folder: str
    numbered: list[Entry | None] = field(default_factory=list)
    """Entries by their numbers, from 1 on; None: damaged, or moved away by `digenrl repair`."""
    facts: dict[str, int] = field(default_factory=dict)
    """Fact -> number of its entry."""
    _looked: float = float("-inf")
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def of_run(cls, store: ObjectStore, run: str) -> Self:
        return cls(store, log_folder(run))

    @classmethod
    def of_evaluations(cls, store: ObjectStore, run: str) -> Self:
        return cls(store, evaluations_log_folder(run))

    @property
    def entries(self) -> Iterator[Entry]:
        return (each for each in self.numbered if each is not None)

    @property
    def newest_first(self) -> Iterator[Entry]:
        return (each for each in reversed(self.numbered) if each is not None)

    def key(self, number: int) -> str:
        return f"{self.folder}/{number:08d}.json"

    async def look(self, max_age_s: float = 0.0) -> None:
        """Read the entries that were appended since the last look, unless that is younger.

        Raises:
            Unavailable: if the store does not answer.
        """
        async with self._lock:
            if time.monotonic() - self._looked < max_age_s:
                return
            # More than the next one: adjacent entries may be missing for ever.
            number_of_reads = 2 if self.numbered else FIRST_ENTRIES
            while await self._read_next(number_of_reads):
                number_of_reads = min(2 * number_of_reads, MAX_CONCURRENT_ENTRIES)
            self._looked = time.monotonic()

    async def append(self, entry: Entry) -> int:
        """Append an entry, unless the log states its fact; return the number of the fact's entry.

        Raises:
            Unavailable: if the store does not answer; it may be appended, and is not if repeated.
        """
        while True:
            await self.look()
            if (entry_number := self.facts.get(entry.fact)) is not None:
                return entry_number
            number = len(self.numbered) + 1
            numbered = entry.model_copy(update={"number": number})
            data = numbered.model_dump_json(exclude_none=True).encode()
            await self.store.create(self.key(number), data)

    async def _read_next(self, number_of_reads: int) -> bool:
        """Read the next entries; return whether there are any."""
        first = len(self.numbered) + 1
        keys = [self.key(number) for number in range(first, first + number_of_reads)]
        contents = await asyncio.gather(*map(self.store.read, keys))
        while contents and contents[-1] is None:
            contents.pop()
        for number, data in enumerate(contents, first):
            entry = _parsed(data, number)
            if entry is None:  # the next one is there: this one came meanwhile, or never will
                entry = _parsed(await self.store.read(self.key(number)), number)
            if entry is None:
                log.warning("log_entry_damaged", key=self.key(number))
            else:
                self.facts.setdefault(entry.fact, number)
            self.numbered.append(entry)
        return bool(contents)


def _parsed(data: bytes | None, number: int) -> Entry | None:
    """Return the entry of a number; None if it is damaged, or the entry of another number."""
    try:
        entry = ENTRY.validate_json(data or b"")
    except ValidationError:
        return None
    return entry if entry.number == number else None
