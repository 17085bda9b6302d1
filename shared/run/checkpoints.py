"""Which optimizer states of a run are stored, and how a run gets from there to its newest version.

A commit waits for the weights alone. Its checkpoint follows, if one is due (`checkpoint_every`),
and a record of its own says that it is complete. The commit record names the newest checkpoint that
was complete by then. Who resumes goes back to the newest complete one, and trains the batches since
then again, by the commands that their commit records name, without new records.
"""

from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgpack
import structlog
from pydantic import ValidationError

from shared.errors import ContractError, IntegrityError
from shared.messages.codec import decode, encode
from shared.messages.contracts import MAX_MESSAGE_BYTES, ObjectRef, Policy, TrainGroup
from shared.messages.records import Count, Digest, Record, Token
from shared.run.commits import CommitRecord, Named, read_commit
from shared.run.layout import KEPT_BATCHES, batch_folder, numbers_in, state_key
from shared.store import ObjectStore
from shared.telemetry import CORRUPT

log = structlog.get_logger()

COMMANDS = ".groups"
"""Suffix of an object with the commands of a batch."""


class CheckpointRecord(Record):
    """Says that the optimizer state of a version is stored; made after its commit record."""

    run: Token
    version: Count
    weights_digest: Digest
    """Digest of the version's trained weights."""
    checkpoint: ObjectRef


class Resumption(NamedTuple):
    """Where a run is resumed."""

    version: int
    checkpoint: ObjectRef


async def add_checkpoint(store: ObjectStore, record: CommitRecord, checkpoint: ObjectRef) -> None:
    """Say that the checkpoint of a committed version is stored."""
    made = CheckpointRecord(
        run=record.run,
        version=record.policy.version,
        weights_digest=record.learned.digest,
        checkpoint=checkpoint,
    )
    key = state_key(made.run, made.version)
    await store.create(key, made.model_dump_json(indent=1).encode())


async def read_checkpoint(store: ObjectStore, run: str, version: int) -> CheckpointRecord | None:
    """Return the record of a version's optimizer state; None if there is none. A damaged record is
    none either: an older state leads to the version as well."""
    key = state_key(run, version)
    data = await store.read(key)
    try:
        return None if data is None else CheckpointRecord.model_validate_json(data)
    except ValidationError:
        CORRUPT.labels(what="checkpoint").inc()
        log.error("checkpoint_record_damaged", key=key, then="an older optimizer state is used")
        return None


async def checkpoint_of(store: ObjectStore, record: CommitRecord) -> ObjectRef | None:
    """Return the checkpoint of this very version; None if it is not stored, or not yet."""
    if record.checkpoint_version is None:
        return record.checkpoint
    found = await read_checkpoint(store, record.run, record.policy.version)
    if found is None or found.weights_digest != record.learned.digest:
        return None
    return found.checkpoint


async def newest_checkpoint(store: ObjectStore, newest: CommitRecord) -> Resumption:
    """Return the newest complete checkpoint of a run whose newest version is this one."""
    known = await stored_versions(store, newest.run)
    since = range(newest.policy.version, newest.resumes_from, -1)
    for version in (each for each in since if each in known):
        is_newest = version == newest.policy.version
        record = newest if is_newest else await read_commit(store, newest.run, version)
        found = None if record is None else await checkpoint_of(store, record)
        if found is not None:
            return Resumption(version, found)
    return Resumption(newest.resumes_from, newest.checkpoint)


async def older_checkpoints(
    store: ObjectStore, newest: CommitRecord, before: int
) -> AsyncGenerator[Resumption]:
    """Yield the checkpoints of versions below ``before`` that are still there, newest first."""
    for version in range(min(before, newest.policy.version) - 1, -1, -1):
        record = await read_commit(store, newest.run, version)
        found = None if record is None else await checkpoint_of(store, record)
        if found is not None and await store.backend.size(found.key) == found.size:
            yield Resumption(version, found)


async def forget_checkpoint(store: ObjectStore, run: str, version: int) -> None:
    """Say no more that the checkpoint of a version is stored, since it is damaged: what is stored
    anew can be named then. One that the commit record itself names stays named."""
    await store.delete([state_key(run, version)])


async def stored_versions(store: ObjectStore, run: str) -> set[int]:
    """Return the versions whose checkpoint was stored after their commit, and is still kept."""
    return set(await numbers_in(store, run, "states"))


async def store_commands(
    store: ObjectStore, run: str, batch: int, commands: Sequence[TrainGroup]
) -> ObjectRef:
    """Store what was sent of the groups of a batch, beside its trajectories."""
    data: bytes = msgpack.packb([encode(each) for each in commands])
    return await store.put(batch_folder(run, batch), data, suffix=COMMANDS)


async def read_commands(store: ObjectStore, record: CommitRecord) -> list[TrainGroup]:
    """Return what was sent of the groups that a version was trained from.

    Raises:
        IntegrityError: if it is not in the store, or of other groups.
    """
    if record.commands is None:
        raise IntegrityError(f"version {record.policy.version} names no commands of its batch")
    data = await store.get(record.commands)
    try:
        packed = msgpack.unpackb(data, max_bin_len=MAX_MESSAGE_BYTES)
        commands = [decode(each) for each in packed]
    except (ContractError, ValueError, TypeError, msgpack.UnpackException) as error:
        raise IntegrityError(f"{record.commands.key} holds no commands") from error
    groups = [each for each in commands if isinstance(each, TrainGroup)]
    wanted = [(record.batch, each.group, each.attempt) for each in record.trained]
    if [(each.batch, each.group, each.attempt) for each in groups] != wanted:
        raise IntegrityError(f"{record.commands.key} is of other groups than were trained")
    return groups


def oldest_needed_batch(newest: CommitRecord) -> int:
    """Return the oldest batch whose trajectories are kept: the last ones are for inspection, and
    those since the newest checkpoint for a resume."""
    return max(0, min(newest.policy.version - KEPT_BATCHES, newest.resumes_from))


@dataclass(frozen=True, slots=True)
class WithCheckpoint:
    """A version with the checkpoint that was stored after its commit, as `Named`."""

    run: str
    policy: Policy
    weights: ObjectRef
    objects: tuple[ObjectRef, ...]


@dataclass(slots=True)
class Checkpoints:
    """Knows which checkpoints of a run are stored: reads each record once."""

    store: ObjectStore
    run: str
    known: dict[int, CheckpointRecord] = field(default_factory=dict)

    async def look(self) -> None:
        """Read what is new, and forget what was deleted."""
        there = await stored_versions(self.store, self.run)
        self.known = {version: self.known[version] for version in self.known.keys() & there}
        for version in sorted(there - self.known.keys()):
            found = await read_checkpoint(self.store, self.run, version)
            if found is not None:
                self.known[version] = found

    def named(self, records: Sequence[Named]) -> list[Named]:
        """Return the records as if each named its own checkpoint, where that is stored."""
        return [self._named(each) for each in records]

    def _named(self, record: Named) -> Named:
        found = self.known.get(record.policy.version)
        if found is None:
            return record
        objects = (*record.objects, found.checkpoint)
        return WithCheckpoint(record.run, record.policy, record.weights, objects)

    def needed(self, newest: int, resumes_from: int) -> set[int]:
        """Return the versions that a resume may go back to: the one that the newest record names,
        for who has begun already, and the newest one that is stored since."""
        since = sorted(each for each in self.known if each <= newest)
        return {resumes_from, *since[-1:]}

    def old_keys(self, kept: Collection[int]) -> set[str]:
        """Return the keys of the records of versions that are not kept."""
        return {state_key(self.run, version) for version in self.known if version not in kept}
