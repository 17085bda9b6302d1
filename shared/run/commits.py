"""The commit records of a run: the truth about what was trained, and whose objects are kept.

A record is one JSON object per policy version, made by exclusive create: its optimizer step
happened exactly if the record exists, and of two trainers only one can make it. Each record names
its parent by the digest of the bytes that are stored of it, so that they form one chain, and a
release with more fields reads the chains of earlier ones. Records are never deleted; retention.py
decides which versions keep their weights and checkpoint.

A version may have two sets of weights: those that sample, and those that the optimizer steps, which
they follow (`CommitRecord.trained_weights`). Sampling, and checks of samples, use the record's
policy; the trainer, evaluation and export use `CommitRecord.learned`.
"""

from typing import NamedTuple, Protocol, Self

from pydantic import Field, FiniteFloat, ValidationError, model_validator

from shared.errors import CommitConflict, ContractError
from shared.messages.contracts import ObjectRef, Policy, PolicyPublished
from shared.messages.fluid import Checksum, Share
from shared.messages.records import (
    Count,
    Digest,
    ExchangeLevels,
    Record,
    Text,
    Token,
    is_empty,
    is_none,
)
from shared.messages.staleness import AdmissibleVersions
from shared.run.layout import commit_key, numbers_in
from shared.run.record_backups import note_damage, sealed, unsealed, valid_copies
from shared.run.record_backups import record_digest as record_digest
from shared.run.usage import count_staleness
from shared.store import ObjectStore


class TrainedGroup(Record):
    group: Count
    attempt: Count
    policy_version: Count
    """Version that generated the group; the batch's number minus this is its staleness."""
    fragments: tuple[tuple[Count, Count, Count], ...]
    """First sample, number of samples and attempt of each fragment."""
    workers: tuple[Token, ...]
    """Addresses of the devices that generated them."""
    rewards: tuple[FiniteFloat | None, ...]
    parts: dict[Token, tuple[FiniteFloat | None, ...]]
    dropped: Text | None = None
    """Reason why the group was not trained on."""


class StoredWeights(NamedTuple):
    ref: ObjectRef
    digest: Digest
    """Digest of the weights themselves, however they are stored."""


class CommitRecord(Record):
    run: Token
    policy: Policy
    """Version that this commit made, with the digest of the weights that sample: version v + 1 is
    trained on batch v."""
    parent: Digest | None
    """SHA-256 of the record before it; None for version 0."""
    weights: ObjectRef
    """Weights that sample."""
    trained_digest: Digest | None = Field(default=None, exclude_if=is_none)
    """Digest of the trained weights; None if they are those that sample."""
    trained_weights: ObjectRef | None = Field(default=None, exclude_if=is_none)
    checkpoint: ObjectRef
    """Optimizer state and random number generators."""
    commands: ObjectRef | None = Field(default=None, exclude_if=is_none)
    """Messages about the groups, with which the batch can be trained again."""
    trained: tuple[TrainedGroup, ...] = ()
    """All groups of the batch, in order; empty for version 0."""
    metrics: dict[str, FiniteFloat] = Field(default_factory=dict)
    worker: Token
    """Address of the trainer."""
    checksum: Checksum | None = Field(default=None, exclude_if=is_none)
    """Checksum of trained weights, moments, average and old policy, where several devices took the
    step."""
    shares: tuple[Share, ...] = Field(default=(), exclude_if=is_empty)
    """Content of each member's sum; together the whole batch, without duplicates."""
    exchange: ExchangeLevels = ExchangeLevels()
    """How weights and sums were rounded."""

    @property
    def batch(self) -> int | None:
        return self.policy.version - 1 if self.policy.version else None

    @property
    def staleness(self) -> dict[int, int]:
        """Number of trained samples by the steps that they were stale."""
        return count_staleness(
            (max(0, (self.batch or 0) - group.policy_version), len(group.rewards))
            for group in self.trained
        )

    @property
    def learned(self) -> StoredWeights:
        """The trained weights."""
        if self.trained_weights is None or self.trained_digest is None:
            return StoredWeights(self.weights, self.policy.weights_digest)
        return StoredWeights(self.trained_weights, self.trained_digest)

    @property
    def objects(self) -> tuple[ObjectRef, ...]:
        """All that the version is stored as, by its record: each of them names objects, or is
        one."""
        change = None if self.weights.change is None else self.weights.change.ref
        references = (self.weights, change, self.trained_weights, self.checkpoint)
        return tuple(each for each in references if each is not None)

    def announcement(self, *, worker: str | None = None, seconds: float = 0.0) -> PolicyPublished:
        """Return the news of this commit; ``worker``: the sender, if not the record's trainer."""
        return PolicyPublished(
            policy=self.policy,
            weights=self.weights,
            worker=self.worker if worker is None else worker,
            seconds=seconds,
            checksum=self.checksum,
        )

    @model_validator(mode="after")
    def _names_both(self) -> Self:
        if (self.trained_digest is None) != (self.trained_weights is None):
            raise ValueError("trained weights have a digest")
        return self

    def encode(self) -> bytes:
        return self.model_dump_json(indent=1).encode()


async def commit(store: ObjectStore, record: CommitRecord) -> None:
    """Commit an optimizer step: store its record.

    Raises:
        CommitConflict: if the version is committed already, by another trainer or by this one
            before it was interrupted.
    """
    key = commit_key(record.run, record.policy.version)
    if not await store.create(key, sealed(record.encode())):
        raise CommitConflict(f"version {record.policy.version} is committed already")


class StoredRecord(NamedTuple):
    record: CommitRecord
    digest: Digest
    """Digest of its stored bytes (`record_digest`)."""


class StoredAs(Protocol):
    """Is a record, or what is kept of it: what the version is stored as."""

    @property
    def run(self) -> str: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def weights(self) -> ObjectRef: ...
    @property
    def objects(self) -> tuple[ObjectRef, ...]: ...


async def read_stored(store: ObjectStore, run: str, version: int) -> StoredRecord | None:
    """Return a record with the digest of its bytes, None if the version is not committed. If it is
    damaged, its copy takes its place.

    Raises:
        ContractError: if the object is no record, and has no copy.
    """
    data = await store.read(commit_key(run, version))
    if data is None:
        return None
    return decoded(data, run, version) or await _verified(store, run, version, data)


async def read_verified(store: ObjectStore, run: str, version: int) -> StoredRecord | None:
    """Return what `read_stored` does, from its copy also if the next record names only the copy."""
    data = await store.read(commit_key(run, version))
    return None if data is None else await _verified(store, run, version, data)


async def _verified(store: ObjectStore, run: str, version: int, data: bytes) -> StoredRecord:
    whole = await whole_bytes(store, run, version, data)
    record = None if whole is None else decoded(whole, run, version)
    if record is None:
        key = commit_key(run, version)
        raise ContractError(f"{key} is not a commit record; {remedy(run)}")
    if whole != data:
        note_damage(run, commit_key(run, version), "commit")
    return record


async def whole_bytes(
    store: ObjectStore, run: str, version: int, data: bytes | None
) -> bytes | None:
    """Return the bytes of a version's record: what is stored of it, or its copy if that is missing
    or damaged and the copy stands in the chain where the record stood; None if neither does.

    A copy is named by its own digest, which proves nothing: any process can make a copy.
    """
    own = None if data is None else decoded(data, run, version)
    copies = await valid_copies(store, run, f"{version:08d}")
    if own is not None and copies.keys() <= {own.digest}:
        return data
    after = decoded(await store.read(commit_key(run, version + 1)) or b"", run, version + 1)
    named = None if after is None else after.record.parent
    if own is not None and named in (None, own.digest):
        return data
    for digest, copy in copies.items():
        record = decoded(copy, run, version)
        if record is not None and named in (None, digest) and await _follows(store, record.record):
            return copy
    return None if own is None else data


async def _follows(store: ObjectStore, record: CommitRecord) -> bool:
    """Whether a record names what is stored of the one before it, or a copy of that."""
    run, before = record.run, record.policy.version - 1
    if before < 0:
        return record.parent is None
    stored = await store.read(commit_key(run, before)) or b""
    copies = await valid_copies(store, run, f"{before:08d}")
    return record.parent in (record_digest(stored), *copies)


async def read_commit(store: ObjectStore, run: str, version: int) -> CommitRecord | None:
    """Raises ContractError as `read_stored` does."""
    stored = await read_stored(store, run, version)
    return None if stored is None else stored.record


def decoded(data: bytes, run: str, version: int) -> StoredRecord | None:
    """Return the record of a version from its bytes; None if they are damaged, or of another."""
    try:
        record = CommitRecord.model_validate_json(unsealed(data))
    except (ValidationError, ContractError):
        return None
    is_it = (record.run, record.policy.version) == (run, version)
    return StoredRecord(record, record_digest(data)) if is_it else None


def remedy(run: str) -> str:
    return f"stop the run, and `digenrl repair {run}` says what can be done"


async def stored_digest(store: ObjectStore, run: str, version: int) -> str:
    """Return the digest of a version's record, which the next record names.

    Raises:
        ContractError: if the version is not committed.
    """
    stored = await read_stored(store, run, version)
    if stored is None:
        raise ContractError(f"{commit_key(run, version)} is missing; {remedy(run)}")
    return stored.digest


async def newest_commit(store: ObjectStore, run: str) -> CommitRecord | None:
    versions = await numbers_in(store, run, "commits")
    record = await read_verified(store, run, versions[-1]) if versions else None
    return None if record is None else record.record


async def commit_chain(store: ObjectStore, run: str) -> list[CommitRecord]:
    """Return every commit of the run, oldest first.

    Raises:
        ContractError: if a record is missing or does not name the one before it.
    """
    chain: list[CommitRecord] = []
    parent: str | None = None
    for version in range(len(await numbers_in(store, run, "commits"))):
        stored = await read_stored(store, run, version)
        if stored is None or stored.record.parent != parent:
            return await _verified_chain(store, run)
        chain.append(stored.record)
        parent = stored.digest
    return chain


async def _verified_chain(store: ObjectStore, run: str) -> list[CommitRecord]:
    chain: list[CommitRecord] = []
    parent: str | None = None
    for version in range(len(await numbers_in(store, run, "commits"))):
        stored = await read_verified(store, run, version)
        if stored is None or stored.record.parent != parent:
            raise broken_chain(run, version)
        chain.append(stored.record)
        parent = stored.digest
    return chain


def broken_chain(run: str, version: int) -> ContractError:
    """Return the error of a chain in which ``version`` does not name the record before it: the one
    or the other is damaged."""
    either = f"{max(0, version - 1)} or {version}"
    return ContractError(
        f"the commits of run {run} are broken at version {version}: the record of version {either} "
        f"is damaged; {remedy(run)}"
    )


async def admissible_versions(
    store: ObjectStore, run: str, policy: Policy, max_staleness: int
) -> AdmissibleVersions:
    """Return the versions that may have generated the batch that is trained from ``policy``: that
    version, then the one before it, if stale samples are allowed and it is committed."""
    if max_staleness == 0 or policy.version == 0:
        return (policy,)
    before = await read_commit(store, run, policy.version - 1)
    return (policy,) if before is None else (policy, before.policy)
