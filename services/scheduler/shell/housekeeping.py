"""Keeps the run's streams and store in order: waits over outages, notices lost streams, keeps the
chain of commits quick to read, and deletes messages and trajectories of old batches and weights of
old versions."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import structlog
from redis.exceptions import RedisError

from services.scheduler import limits
from shared.bus.bus import Bus
from shared.bus.streams import StreamState
from shared.errors import DigenRLError, IntegrityError, Unavailable
from shared.messages import subjects
from shared.process.failpoints import reach
from shared.process.service import Health
from shared.run.chain import SEGMENT_STEPS, Chain, CommitSummary, read_chain
from shared.run.commands import oldest_needed_batch
from shared.run.commits import CommitRecord, StoredAs
from shared.run.evaluations import GoldFigures
from shared.run.layout import (
    KEPT_BATCHES,
    batch_folder,
    batches_with_previews,
    previews_folder,
    stored_batches,
)
from shared.run.previews import PreviewRule
from shared.run.record_backups import keep_copy
from shared.run.retention import (
    Manifests,
    Retention,
    deletable,
    kept_now,
    own_keys,
    version_folders,
)
from shared.store import ObjectStore
from shared.telemetry import ALARM, NATS_STORES_NOTHING

STORES_NOTHING = (
    f"{NATS_STORES_NOTHING}, as when its disk was full: make room on the disk of its store_dir, "
    "then restart it (digenrl up does so; systemctl restart nats; docker compose restart nats)"
)

T = TypeVar("T")

log = structlog.get_logger()


async def retry(work: Callable[[], Awaitable[T]]) -> T:
    """The result of ``work``, over outages of the store, the index or the broker."""
    while True:
        try:
            return await work()
        except (Unavailable, RedisError, OSError) as error:
            log.warning("retrying", error=repr(error))
            await asyncio.sleep(limits.RETRY_S)


class StreamsLost(DigenRLError):
    """Messages are gone on which the scheduler's state rests."""


async def read_kept_chain(store: ObjectStore, run: str) -> Chain:
    """Return the chain of a run, with the steps of which something may still be stored.

    Raises:
        ContractError: if it is broken.
    """
    keys = {key for folder in version_folders(run) for key in await store.keys(folder)}

    def has_objects(step: CommitSummary) -> bool:
        return any(ref.key in keys for ref in step.objects)

    return await read_chain(store, run, wanted=has_objects)


def check_streams(states: Mapping[str, StreamState | None]) -> None:
    """Raises StreamsLost if some streams are missing where a scheduler begins. Without any of them
    the run begins from its commits."""
    lost = sorted(name for name, state in states.items() if state is None)
    if 0 < len(lost) < len(states):
        raise StreamsLost(f"{', '.join(lost)}: messages are lost")


@dataclass(frozen=True, slots=True)
class StreamWatch:
    """Watches the streams that a run goes through."""

    bus: Bus
    health: Health
    make_room: Callable[[], None]
    """Called as long as a stream is nearly full."""
    seconds_unstored: Callable[[], float] = lambda: 0.0
    """Seconds for which NATS has not taken what is stored all the time. It is small, and a full
    disk may have space for some of it; pending writes of the bus are a second sign."""
    alarm: Callable[[str, str], None] = lambda what, reason: None
    """Called with each alarm and its text at every check; the text is empty if the alarm is not
    firing."""
    refused: Callable[[], Mapping[str, str]] = dict
    """Alarms of the stores with their texts; empty if not firing."""
    of_run: Callable[[], Mapping[str, str]] = dict
    """The same of the run, which stays ready."""

    async def run(self, before: Mapping[str, StreamState | None]) -> None:
        """Check without end; ``before``: the streams' states when they were made.

        Raises:
            StreamsLost: as soon as a stream is gone, was made again or set back.
        """
        looked = answers_since = time.monotonic()
        while True:
            await asyncio.sleep(limits.STREAM_CHECK_S)
            try:
                now = await self.bus.stream_states()
            except Unavailable as error:
                self._say(str(error))
                answers_since = time.monotonic()
                continue
            looked, before_that = time.monotonic(), looked
            if looked - before_that > 3 * limits.STREAM_CHECK_S:  # no answer, or this stood still
                answers_since = looked
            lost = [n for n, state in before.items() if state is None or state.is_lost_in(now[n])]
            if lost:
                raise StreamsLost(f"{', '.join(lost)}: messages are lost")
            before = now
            self._look_for_room(now, looked - answers_since)

    def _look_for_room(self, states: Mapping[str, StreamState | None], answers_for: float) -> None:
        """Report streams without space; ``answers_for``: seconds for which NATS has answered."""
        slots = ((stream.name, states[stream.name]) for stream in subjects.STREAMS if stream.slots)
        full = {
            name for name, state in slots if state is not None and state.filled > limits.MAX_FILLED
        }
        full.update(self.bus.full.values())
        unstored = min(max(self.seconds_unstored(), self.bus.seconds_unstored), answers_for)
        stores = unstored < limits.NATS_ALARM_DELAY_S
        refused = self.refused()
        alarms = {
            "nats_stores_nothing": "" if stores else STORES_NOTHING,
            "stream_full": ", ".join(sorted(full)),
        }
        for what, reason in {**alarms, **refused, **self.of_run()}.items():
            ALARM.labels(what=what).set(bool(reason))
            self.alarm(what, reason)
        if not stores:
            self._say(STORES_NOTHING)
        elif full:
            self.make_room()
            self._say(f"{', '.join(sorted(full))}: full; messages wait for room")
        elif any(refused.values()):
            self._say("; ".join(filter(None, refused.values())))
        elif not self.health.ready:
            log.info("streams_in_order")
            self.health.is_ready()

    def _say(self, reason: str) -> None:
        if self.health.reason != reason:
            log.error("streams_not_in_order", reason=reason)
            self.health.is_not_ready(reason)


@dataclass(slots=True)
class BatchCleanup:
    """Removes objects of committed batches that no recovery needs, concurrently with the handling
    of events."""

    _bus: Bus
    _store: ObjectStore
    _previews: PreviewRule = field(default_factory=PreviewRule)
    """Which batches keep their small pictures."""
    _queue: "asyncio.Queue[tuple[int, int]]" = field(default_factory=asyncio.Queue)
    """Batches whose messages are forgotten, each with the oldest whose trajectories stay."""
    _hurried: set[int] = field(default_factory=set)
    """Batches that were forgotten early to make room."""
    _oldest: int = 0
    """Oldest batch whose trajectories are there."""

    def committed(self, record: CommitRecord) -> None:
        """Forget older batches a moment after a version is committed."""
        version = record.policy.version
        if version > KEPT_BATCHES:
            old = version - 1 - KEPT_BATCHES
            later = asyncio.get_running_loop().call_later
            later(
                limits.CLEANUP_DELAY_S, self._queue.put_nowait, (old, oldest_needed_batch(record))
            )

    def make_room(self, newest: int) -> None:
        """Forget the messages of every committed batch, since streams are nearly full."""
        for batch in range(max(0, newest - KEPT_BATCHES), newest):
            if batch not in self._hurried:
                self._hurried.add(batch)
                self._queue.put_nowait((batch, self._oldest))

    async def run(self, newest: CommitRecord | None) -> None:
        """Clean up batches without end, beginning with the remains of a dead scheduler and of dead
        writers."""
        await retry(self._sweep)
        if newest is not None:
            self._oldest = needed = oldest_needed_batch(newest)
            for batch in await retry(partial(stored_batches, self._store, self._bus.run)):
                if batch < newest.policy.version - KEPT_BATCHES:
                    self._queue.put_nowait((batch, min(batch + 1, needed)))
                    self._oldest = min(self._oldest, batch)
            await self._old_previews(newest.policy.version - 1 - KEPT_BATCHES)
        while True:
            batch, oldest = await self._queue.get()
            reach("scheduler.before-cleanup")
            await retry(partial(self._bus.forget_batch, batch))
            reach("scheduler.in-cleanup")
            for old in range(self._oldest, oldest):
                folder = batch_folder(self._bus.run, old)
                await retry(partial(self._store.delete_folder, folder))
            self._oldest = max(self._oldest, oldest)
            reach("scheduler.after-cleanup")
            left = batch - self._previews.newest
            if left >= 0 and not self._previews.keeps(left, batch):
                folder = previews_folder(self._bus.run, left)
                await retry(partial(self._store.delete_folder, folder))

    async def _old_previews(self, newest: int) -> None:
        """Delete the previews that a scheduler has left which was ended in between."""
        for batch in await retry(partial(batches_with_previews, self._store, self._bus.run)):
            if not self._previews.keeps(batch, newest):
                folder = previews_folder(self._bus.run, batch)
                await retry(partial(self._store.delete_folder, folder))

    async def _sweep(self) -> None:
        writes = await self._store.unfinished(self._bus.run)
        old = [
            each for each in writes if each.modified < time.time() - limits.INTERRUPTED_WRITE_AGE_S
        ]
        if old:
            await self._store.delete_unfinished(old)
            log.info("unfinished_writes_deleted", objects=len(old))


@dataclass(slots=True)
class ChainUpkeep:
    """Stores segments of the chain and copies of commit records, concurrently with the handling of
    events."""

    store: ObjectStore
    run: str
    chain: Callable[[], Chain]
    _ends: "asyncio.Queue[int]" = field(default_factory=asyncio.Queue)
    """Versions up to which segments are to be stored."""
    _uncopied: "asyncio.Queue[CommitSummary]" = field(default_factory=asyncio.Queue)

    def committed(self, step: CommitSummary) -> None:
        """Take up a version that the chain has now."""
        self._uncopied.put_nowait(step)
        if (step.version + 1) % SEGMENT_STEPS == 0:
            self._ends.put_nowait(step.version + 1)

    async def store_segments(self) -> None:
        """Store segments without end."""
        while True:
            end = await self._ends.get()
            await retry(partial(self.chain().keep, end))

    async def copy_records(self) -> None:
        """Copy records without end; first the records of the newest versions, which a dead
        scheduler may not have copied."""
        for each in [*self.chain().recent][-limits.MAX_CHECKED_COPIES :]:
            self._uncopied.put_nowait(each)
        while True:
            each = await self._uncopied.get()
            await retry(partial(keep_copy, self.store, self.run, each.version, each.digest))


@dataclass(slots=True)
class VersionCleanup:
    """Deletes weights and checkpoints of versions that are no longer needed."""

    store: ObjectStore
    run: str
    retention: Retention
    chain: Callable[[], Sequence[StoredAs]]
    """The newest version, last, and all before it of which something may be stored."""
    in_use: Callable[[], Collection[int]]
    """Versions that workers report to use."""
    forget: Callable[[Collection[int]], None] = lambda versions: None
    """Called with versions of which nothing is stored any more."""
    _manifests: Manifests = field(init=False)
    _gold: GoldFigures = field(init=False)

    def __post_init__(self) -> None:
        self._manifests = Manifests(self.store)
        self._gold = GoldFigures(self.store, self.run, self.retention.gold_weights)

    async def look_for_ever(self) -> None:
        seen_version = -1
        while True:
            await asyncio.sleep(limits.VERSION_CHECK_S)
            newest = max((each.policy.version for each in self.chain()), default=-1)
            if newest != seen_version:
                seen_version = newest
                try:
                    await self.look()
                except (IntegrityError, Unavailable) as error:
                    log.warning("old_versions_left", error=str(error))
                    seen_version = -1

    async def look(self) -> None:
        """Delete what is no longer needed; raises Unavailable if the store does not answer."""
        chain = list(self.chain())
        if not chain:
            return
        newest = chain[-1].policy.version
        kept = await kept_now(self.retention, self._gold, newest, self.in_use())
        folders = version_folders(self.run)
        keys = {key for folder in folders for key in await self.store.keys(folder)}
        shards = await self._manifests.shards(chain, keys, kept)
        left = set(keys)
        for old in deletable(chain, kept, shards):
            if old & keys:
                await self.store.delete(sorted(old & keys))
                log.info("old_versions_deleted", objects=len(old & keys), kept=len(kept))
                left -= old
        old_versions = (each for each in chain if each.policy.version not in kept)
        deleted = [each for each in old_versions if left.isdisjoint(own_keys(each))]
        self.forget([each.policy.version for each in deleted])
