"""The chain of a run's commits, summarised: what is needed of thousands of old steps.

A commit record names every fragment and reward of its batch; of old steps a scheduler needs a
digest, the names of what is stored, and the metrics. Segments, `<run>/chain/<first version>.json`,
hold summaries of 32 versions in a row.

They follow from the records and are never relied on: one that is missing, cannot be read or does
not lead to the newest record is left aside, the records are read, and it is made again. A run
without segments gets them, and a process that dies at any time loses nothing.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import structlog
from pydantic import Field, FiniteFloat, ValidationError

from shared.errors import ContractError
from shared.limits import MAX_CONCURRENT_READS, MAX_RECENT_STEPS
from shared.messages.contracts import ObjectRef, Policy
from shared.messages.records import Count, Digest, Record, Token
from shared.run.commits import CommitRecord, StoredRecord, broken_chain, read_stored, read_verified
from shared.run.layout import named_objects, numbers_in, segment_key
from shared.store import ObjectStore

SEGMENT_STEPS = 32
"""Versions of a segment."""

log = structlog.get_logger()


class CommitSummary(Record):
    """Sums up a commit record."""

    run: Token
    policy: Policy
    digest: Digest
    """Digest of the record's stored bytes: the next record names it."""
    weights: ObjectRef
    others: tuple[ObjectRef, ...] = ()
    """Further stored objects of the version."""
    staleness: tuple[tuple[Count, Count], ...] = ()
    """Steps by which samples were stale, and how many were."""
    metrics: dict[str, FiniteFloat] = Field(default_factory=dict)

    @property
    def version(self) -> int:
        return self.policy.version

    @property
    def batch(self) -> int | None:
        return self.version - 1 if self.version else None

    @property
    def objects(self) -> tuple[ObjectRef, ...]:
        return (self.weights, *self.others)


class Segment(Record):
    first: Count
    parent: Digest | None
    """Digest of the record before the first one."""
    steps: tuple[CommitSummary, ...]


def summarise_commit(stored: StoredRecord) -> CommitSummary:
    """Sum up a record."""
    record = stored.record
    return CommitSummary(
        run=record.run,
        policy=record.policy,
        digest=stored.digest,
        weights=record.weights,
        others=tuple(ref for ref in record.objects if ref != record.weights),
        staleness=tuple(sorted(record.staleness.items())),
        metrics=record.metrics,
    )


@dataclass(slots=True)
class Chain:
    """Knows the newest commits of a run, and where the others are."""

    store: ObjectStore
    run: str
    newest: CommitRecord | None = None
    recent: deque[CommitSummary] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_STEPS))
    """The newest steps, oldest first."""
    wanted: list[CommitSummary] = field(default_factory=list)
    """Steps requested from `read_chain`, the newest one, and all later ones."""

    @property
    def version(self) -> int:
        """Number of the newest version; -1 before the first."""
        return -1 if self.newest is None else self.newest.policy.version

    def add(self, stored: StoredRecord) -> CommitSummary:
        """Take the next record, which was just committed."""
        step = summarise_commit(stored)
        self.newest = stored.record
        self.recent.append(step)
        self.wanted.append(step)
        return step

    def forget(self, versions: Collection[int]) -> None:
        """Drop these from `wanted`."""
        self.wanted = [step for step in self.wanted if step.version not in versions]

    async def page(self, before: int, number: int) -> list[CommitSummary]:
        """Return at most ``number`` steps, of versions below ``before``, newest first.

        Reads a segment for each 32 of them that are not in memory.

        Raises:
            ContractError: if one was never committed.
        """
        before = min(before, self.version + 1)
        first = max(0, before - number)
        steps_by_version = {step.version: step for step in self.recent}
        for start in range(first - first % SEGMENT_STEPS, before, SEGMENT_STEPS):
            wanted = range(max(first, start), min(before, start + SEGMENT_STEPS))
            if not all(version in steps_by_version for version in wanted):
                segment = await _read(self.store, self.run, start)
                steps = await self._records(wanted) if segment is None else segment.steps
                steps_by_version |= {step.version: step for step in steps}
        return [steps_by_version[version] for version in reversed(range(first, before))]

    async def _records(self, versions: Sequence[int]) -> list[CommitSummary]:
        return [summarise_commit(each) for each in await _stored(self.store, self.run, versions)]

    async def keep(self, end: int) -> None:
        """Store the segment of the versions before ``end``, a multiple of `SEGMENT_STEPS`."""
        first = end - SEGMENT_STEPS
        steps = tuple(step for step in self.recent if first <= step.version < end)
        before = [step.digest for step in self.recent if step.version == first - 1]
        if len(steps) < SEGMENT_STEPS or (first and not before):
            return  # so far behind that it is made when the chain is read again
        segment = Segment(first=first, parent=before[0] if before else None, steps=steps)
        await _store(self.store, self.run, segment)


async def read_chain(
    store: ObjectStore, run: str, *, wanted: Callable[[CommitSummary], bool] = lambda step: False
) -> Chain:
    """Return the chain of a run.

    Once all segments exist, this reads one per 32 versions and 32 records at most; it makes
    missing segments.

    Args:
        wanted: steps to keep in `Chain.wanted`.

    Raises:
        ContractError: if a record is missing or does not name the one before it.
    """
    versions = await numbers_in(store, run, "commits")
    count = len(versions)
    if versions and versions[-1] != count - 1:
        raise ContractError(f"the commits of run {run} are broken: a record is missing")
    keys = frozenset(await named_objects(store, run, "chain"))
    for usable, careful in ((keys, False), (frozenset[str](), False), (frozenset[str](), True)):
        reader = _Reader(store, run, count, usable, wanted, careful)
        if await reader.read() and await reader.is_confirmed():
            return reader.chain()
        log.warning("chain_broken", run=run, version=reader.length, segments=len(usable))
    raise broken_chain(run, reader.length)


@dataclass(slots=True)
class _Reader:
    store: ObjectStore
    run: str
    count: int
    """Number of versions."""
    there: Collection[str]
    """Keys of segments that may be used."""
    is_wanted: Callable[[CommitSummary], bool]
    careful: bool = False
    """Whether each record is compared with its copy."""
    length: int = 0
    """Number of steps so far."""
    steps: deque[CommitSummary] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_STEPS))
    """The newest of them."""
    wanted: list[CommitSummary] = field(default_factory=list)
    newest: CommitRecord | None = None

    @property
    def _digest(self) -> str | None:
        return self.steps[-1].digest if self.steps else None

    async def read(self) -> bool:
        """Read on to the newest version; whether all of it is one chain."""
        while (first := self.length) < self.count:
            whole = first % SEGMENT_STEPS == 0 and first + SEGMENT_STEPS <= self.count
            if whole and await self._take(first):
                continue
            before = self._digest
            end = min(first + SEGMENT_STEPS, self.count)
            if not await self._take_records(range(first, end)):
                return False
            if whole:
                await self._make(first, before)
        return True

    async def is_confirmed(self) -> bool:
        """Whether the last step really comes from the newest record, for which no later record
        vouches."""
        if not self.count:
            return True
        [stored] = await _stored(self.store, self.run, [self.count - 1], careful=True)
        self.newest = stored.record
        return stored.digest == self._digest

    def chain(self) -> Chain:
        """The steps read; the newest step is always wanted."""
        newest = [step for step in [*self.steps][-1:] if step not in self.wanted[-1:]]
        wanted = [*self.wanted, *newest]
        return Chain(self.store, self.run, self.newest, self.steps, wanted)

    async def _take(self, first: int) -> bool:
        """Add a segment, if one continues from here."""
        if segment_key(self.run, first) not in self.there:
            return False
        segment = await _read(self.store, self.run, first)
        if segment is None or segment.parent != self._digest:
            return False
        for step in segment.steps:
            self._add(step)
        return True

    async def _take_records(self, versions: range) -> bool:
        """Add records, if they continue from here."""
        records = await _stored(self.store, self.run, versions, careful=self.careful)
        for stored in records:
            if stored.record.parent != self._digest:
                return False
            self._add(summarise_commit(stored))
        return True

    def _add(self, step: CommitSummary) -> None:
        self.length += 1
        self.steps.append(step)
        if self.is_wanted(step):
            self.wanted.append(step)

    async def _make(self, first: int, parent: str | None) -> None:
        """Store a segment of the records that were read."""
        steps = tuple(self.steps)[-SEGMENT_STEPS:]
        await _store(self.store, self.run, Segment(first=first, parent=parent, steps=steps))


async def _stored(
    store: ObjectStore, run: str, versions: Sequence[int], *, careful: bool = False
) -> list[StoredRecord]:
    """Read records, some at a time; raises ContractError if one is missing."""
    read = read_verified if careful else read_stored
    records: list[StoredRecord] = []
    for begin in range(0, len(versions), MAX_CONCURRENT_READS):
        part = versions[begin : begin + MAX_CONCURRENT_READS]
        for version, each in zip(
            part, await asyncio.gather(*(read(store, run, n) for n in part)), strict=True
        ):
            if each is None:
                raise ContractError(f"the commits of run {run} are broken at version {version}")
            records.append(each)
    return records


async def _read(store: ObjectStore, run: str, first: int) -> Segment | None:
    """Return a segment; None if it is missing, or does not match its name."""
    key = segment_key(run, first)
    data = await store.read(key)
    if data is None:
        return None
    try:
        segment = await asyncio.to_thread(Segment.model_validate_json, data)
    except ValidationError:
        log.warning("chain_segment_unreadable", key=key)
        return None
    names = [(step.run, step.version) for step in segment.steps]
    is_right = names == [(run, version) for version in range(first, first + SEGMENT_STEPS)]
    return segment if is_right else None


async def _store(store: ObjectStore, run: str, segment: Segment) -> None:
    data = await asyncio.to_thread(segment.model_dump_json, exclude_defaults=True)
    await store.write(segment_key(run, segment.first), data.encode())
