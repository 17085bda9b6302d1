"""Events of a run, in the same order for every reader: commits, the run's log and the log of
evaluations.

Each of these is numbered without gaps in the object store, where it outlasts its writer. A position
is the number of facts of each that were read, so a reader that continues from it, whichever process
serves it, misses nothing and gets nothing twice. No state is kept per reader, and each object is
read once for all readers.
"""

import asyncio
import re
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shared.errors import ContractError
from shared.run.commits import CommitRecord, read_commit
from shared.run.layout import commit_key
from shared.run.log import Log
from shared.run.log_entries import DeadLetter, Entry, Evaluation
from shared.store import ObjectStore

ABSENCE_CACHE_S = 0.5
"""Seconds for which the store is not asked again for what was not there."""
MAX_KEPT_COMMITS = 2048
"""Commits that are kept in memory."""
MAX_EVENTS_PER_READ = 64
"""Events that a reader is given at once."""
POSITION = re.compile(r"c(\d{1,9})\.l(\d{1,9})\.e(\d{1,9})", re.ASCII)

Fields = dict[str, Any]


class Fact(NamedTuple):
    """An event for readers; without a name, a number that stays unused."""

    name: str = ""
    fields: Fields = {}  # noqa: RUF012 -- never changed


EMPTY_FACT = Fact()


@dataclass(frozen=True, slots=True)
class Position:
    """How many facts of each kind a reader knows."""

    commits: int = 0
    log: int = 0
    evaluations: int = 0

    def __str__(self) -> str:
        return f"c{self.commits}.l{self.log}.e{self.evaluations}"

    @classmethod
    def parse(cls, text: str) -> "Position | None":
        """Return the position; None for an invalid text.

        >>> str(Position.parse("c3.l7.e1"))
        'c3.l7.e1'
        >>> Position.parse("12")
        """
        found = POSITION.fullmatch(text)
        return None if found is None else cls(*map(int, found.groups()))


def commit_fields(record: CommitRecord) -> Fields:
    """Return the fields of the event of a commit."""
    return {
        "version": record.policy.version, "batch": record.batch,
        "reward_mean": record.metrics.get("reward_mean"), "metrics": dict(record.metrics),
        "weights_digest": record.policy.weights_digest,
    }  # fmt: skip


def evaluation_fields(entry: Evaluation) -> Fields:
    """Return the fields of the event of a finished evaluation."""
    return {
        "version": entry.version, "settings": entry.settings, "seconds": entry.seconds,
        "alarms": list(entry.alarms), **entry.figures,
    }  # fmt: skip


def _fact(entry: Entry | None) -> Fact:
    if entry is None:
        return EMPTY_FACT
    if isinstance(entry, Evaluation):
        return Fact(entry.event, evaluation_fields(entry))
    hidden = {"event", "data", "digest", "stream"}
    if not isinstance(entry, DeadLetter):
        hidden.add("number")
    return Fact(entry.event, entry.model_dump(exclude=hidden))


@dataclass(slots=True)
class Commits:
    """Reads the facts of commits by their versions."""

    store: ObjectStore
    run: str
    head: int = 0
    """A version below which all are there."""
    _kept: OrderedDict[int, Fact] = field(default_factory=OrderedDict)
    _missing: dict[int, float] = field(default_factory=dict)
    """When it was seen that a version is not there."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def get(self, version: int) -> Fact | None:
        """Return the fact of a version, None if it is not there yet; one that is missing although
        the next one is there is nothing."""
        async with self._lock:
            found = self._kept.get(version)
            if (
                found is None
                and time.monotonic() - self._missing.get(version, -ABSENCE_CACHE_S)
                >= ABSENCE_CACHE_S
            ):
                found = await self._read(version)
                if found is None and await self._exists(version + 1):
                    found = await self._read(version) or EMPTY_FACT  # both may have come since
                self._keep(version, found)
        return found

    async def _read(self, version: int) -> Fact | None:
        try:
            record = await read_commit(self.store, self.run, version)
        except ContractError:
            return EMPTY_FACT  # a damaged one stops the run, not its readers
        return None if record is None else Fact("commit", commit_fields(record))

    async def _exists(self, version: int) -> bool:
        return await self.store.read(commit_key(self.run, version)) is not None

    def _keep(self, version: int, found: Fact | None) -> None:
        if found is None:
            self._missing = {version: time.monotonic()}
            return
        self._kept[version] = found
        self.head = max(self.head, version + 1)
        while len(self._kept) > MAX_KEPT_COMMITS:
            self._kept.popitem(last=False)

    async def end(self) -> int:
        """Return the number after the newest version; about ten objects are looked at."""
        low, step = self.head, 1
        while await self._exists(low + step - 1):
            step *= 2
        high = low + step - 1  # is not there; all below `low` are
        while low < high:
            middle = (low + high) // 2
            if await self._exists(middle):
                low = middle + 1
            else:
                high = middle
        self.head = low
        return low


@dataclass(slots=True)
class Feed:
    """Gives readers what has happened after a position."""

    store: ObjectStore
    run: str
    log: Log
    evaluations: Log
    _commits: Commits = field(init=False)

    def __post_init__(self) -> None:
        self._commits = Commits(self.store, self.run)

    async def now(self) -> Position:
        """Return the position after everything that has happened."""
        for each in (self.log, self.evaluations):
            await each.look()
        known = len(self.log.numbered), len(self.evaluations.numbered)
        return Position(await self._commits.end(), *known)

    async def after(self, at: Position) -> list[tuple[Position, Fact]]:
        """Return what has happened after a position, each with the position after it.

        Raises:
            Unavailable: if the store does not answer.
        """
        found: list[tuple[Position, Fact]] = []
        while (
            len(found) < MAX_EVENTS_PER_READ
            and (fact := await self._commits.get(at.commits)) is not None
        ):
            at = replace(at, commits=at.commits + 1)
            found.append((at, fact))
        for name in ("log", "evaluations"):
            log: Log = getattr(self, name)
            await log.look(ABSENCE_CACHE_S)
            first = getattr(at, name)
            for number, entry in enumerate(
                log.numbered[first : first + MAX_EVENTS_PER_READ], first + 1
            ):
                at = replace(at, **{name: number})
                found.append((at, _fact(entry)))
        return found
