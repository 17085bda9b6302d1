"""What has happened in a run, in an order that everybody sees alike: commits, timelines, dead
letters, the journal and evaluations.

Each of these is numbered without gaps in the object store, where it outlasts whoever wrote it. A
position says how many of each kind were read, so whoever goes on from it, wherever and after
whatever died, misses nothing and gets nothing twice. Nothing is kept per reader, and each object is
read once, however many read.
"""

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from digenrl.evaluation.records import EvaluationRecord, Evaluations
from digenrl.evaluation.told import read_told, told_key
from shared.errors import ContractError
from shared.run.commits import CommitRecord, read_commit
from shared.run.dead_letters import letter_key, read_letter
from shared.run.journal import entry_key, read_entry
from shared.run.layout import commit_key, timeline_key
from shared.store import ObjectStore

LOOK_S = 0.5
"""Seconds for which it is believed that an object is not there yet."""
KEPT = 2048
"""Facts of each kind that are kept in memory."""
AT_ONCE = 64
"""Most events that a reader is given at once."""
COMMITS_AFTER = 3
"""A timeline that is not there although so many versions were committed after its batch began was
never stored: the scheduler died."""
LATE_S = 5.0
"""Seconds after which a missing timeline counts as never stored once the next one is stored: the
last batches of a run have too few versions after them."""
POSITION = re.compile(r"c(\d{1,9})\.t(\d{1,9})\.d(\d{1,9})\.j(\d{1,9})(?:\.e(\d{1,9}))?", re.ASCII)
"""Those of releases that told no evaluations have no last part."""

Fields = dict[str, Any]


class Fact(NamedTuple):
    """What a reader is told; without a name, that there will be nothing at this number."""

    name: str = ""
    fields: Fields = {}  # noqa: RUF012 -- never changed


NOTHING = Fact()


@dataclass(frozen=True, slots=True)
class Position:
    """Says how many facts of each kind a reader knows."""

    commits: int = 0
    timelines: int = 0
    letters: int = 0
    entries: int = 0
    evaluations: int = 0

    def __str__(self) -> str:
        known = f"c{self.commits}.t{self.timelines}.d{self.letters}.j{self.entries}"
        return f"{known}.e{self.evaluations}"

    @classmethod
    def parse(cls, text: str) -> "Position | None":
        """Return the position; None if the text is none.

        >>> str(Position.parse("c3.t2.d0.j7.e1")), str(Position.parse("c3.t2.d0.j7"))
        ('c3.t2.d0.j7.e1', 'c3.t2.d0.j7.e0')
        >>> Position.parse("12")
        """
        found = POSITION.fullmatch(text)
        return None if found is None else cls(*(int(each or 0) for each in found.groups()))


def commit_fields(record: CommitRecord) -> Fields:
    """Return what a reader is told of a commit."""
    return {
        "version": record.policy.version, "batch": record.batch,
        "reward_mean": record.metrics.get("reward_mean"), "metrics": dict(record.metrics),
        "weights_digest": record.policy.weights_digest,
    }  # fmt: skip


def evaluation_fields(record: EvaluationRecord, settings: str) -> Fields:
    """Return what a reader is told of a finished evaluation at settings of this name."""
    return {
        "version": record.version, "settings": settings, "seconds": record.seconds,
        "alarms": list(record.alarms), **record.quality.model_dump(exclude_none=True),
    }  # fmt: skip


@dataclass(slots=True)
class Source:
    """Reads the facts of one kind by their numbers, from 0 on."""

    read: Callable[[int], Awaitable[Fact | None]]
    """Returns a fact; None if it is not there."""
    exists: Callable[[int], Awaitable[bool]]
    head: int = 0
    """A number below which all are there."""
    _kept: OrderedDict[int, Fact] = field(default_factory=OrderedDict)
    _missing: dict[int, float] = field(default_factory=dict)
    """When it was seen that a number is not there."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def get(self, number: int) -> Fact | None:
        """Return the fact of a number, None if it is not there yet; one that is missing although
        the next one is there is nothing."""
        async with self._lock:
            found = self._kept.get(number)
            if found is None and time.monotonic() - self._missing.get(number, -LOOK_S) >= LOOK_S:
                found = await self.read(number)
                if found is None and await self.exists(number + 1):
                    found = await self.read(number) or NOTHING  # both may have come since
                self._keep(number, found)
        return found

    def _keep(self, number: int, found: Fact | None) -> None:
        if found is None:
            self._missing = {number: time.monotonic()}
            return
        self._kept[number] = found
        self.head = max(self.head, number + 1)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    async def end(self) -> int:
        """Return the number after the newest fact; about ten objects are looked at."""
        low, step = self.head, 1
        while await self.exists(low + step - 1):
            step *= 2
        high = low + step - 1  # is not there; all below `low` are
        while low < high:
            middle = (low + high) // 2
            if await self.exists(middle):
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
    _commits: Source = field(init=False)
    _timelines: Source = field(init=False)
    _letters: Source = field(init=False)
    _entries: Source = field(init=False)
    _evaluations: Source = field(init=False)
    _passed_since: dict[int, float] = field(default_factory=dict)
    """When it was seen that a timeline is not there, and the next one is."""

    def __post_init__(self) -> None:
        store, run = self.store, self.run

        def there(key: Callable[[int], str]) -> Callable[[int], Awaitable[bool]]:
            async def exists(number: int) -> bool:
                return await store.read(key(number)) is not None

            return exists

        async def never(number: int) -> bool:
            return False

        self._commits = Source(self._commit, there(lambda n: commit_key(run, n)))
        self._timelines = Source(self._timeline, never)
        self._letters = Source(self._letter, there(lambda n: letter_key(run, n + 1)))
        self._entries = Source(self._entry, there(lambda n: entry_key(run, n + 1)))
        self._evaluations = Source(self._evaluation, there(lambda n: told_key(run, n + 1)))

    async def now(self) -> Position:
        """Return the position after everything that has happened."""
        commits = await self._commits.end()
        return Position(
            commits, max(0, commits - COMMITS_AFTER), await self._letters.end(),
            await self._entries.end(), await self._evaluations.end(),
        )  # fmt: skip

    async def after(self, at: Position) -> list[tuple[Position, Fact]]:
        """Return what has happened after a position, each with the position after it.

        Raises:
            Unavailable: if the store does not answer.
        """
        found: list[tuple[Position, Fact]] = []
        for name in ("commits", "timelines", "letters", "entries", "evaluations"):
            source: Source = getattr(self, f"_{name}")
            while len(found) < AT_ONCE:
                number = getattr(at, name)
                fact = await source.get(number)
                if fact is None:
                    break
                at = replace(at, **{name: number + 1})
                found.append((at, fact))
        return found

    async def _commit(self, version: int) -> Fact | None:
        try:
            record = await read_commit(self.store, self.run, version)
        except ContractError:
            return NOTHING  # a damaged one stops the run, not its readers
        if record is None:
            return None
        return Fact("commit", commit_fields(record))

    async def _timeline(self, batch: int) -> Fact | None:
        for is_last_look in (False, True):
            if await self.store.read(timeline_key(self.run, batch)) is not None:
                return Fact("timeline", {"batch": batch})
            if not is_last_look and not await self._is_passed(batch):
                return None
        return NOTHING

    async def _is_passed(self, batch: int) -> bool:
        """Returns True if readers skip the missing timeline of a batch."""
        if await self.store.read(commit_key(self.run, batch + COMMITS_AFTER)) is not None:
            return True
        if await self.store.read(timeline_key(self.run, batch + 1)) is None:
            return False
        since = self._passed_since.setdefault(batch, time.monotonic())
        return time.monotonic() - since >= LATE_S

    async def _letter(self, index: int) -> Fact | None:
        letter = await read_letter(self.store, self.run, index + 1)
        if letter is None:
            return None
        shown = letter.model_dump(include={"number", "kind", "reason", "subject", "work"})
        return Fact("dead_letter", shown)

    async def _entry(self, index: int) -> Fact | None:
        entry = await read_entry(self.store, self.run, index + 1)
        if entry is None:
            return None
        return Fact(entry.kind, entry.model_dump(exclude={"kind"}))

    async def _evaluation(self, index: int) -> Fact | None:
        if await self.store.read(told_key(self.run, index + 1)) is None:
            return None
        told = await read_told(self.store, self.run, index + 1)
        if told is None:
            return NOTHING
        try:
            record = await Evaluations(self.store, self.run, told.settings).read(told.version)
        except ContractError:
            return NOTHING
        if record is None:
            return NOTHING
        return Fact("evaluation", evaluation_fields(record, told.settings))
