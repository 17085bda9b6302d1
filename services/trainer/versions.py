"""Makes new weights a policy version: store them, commit, then announce it, in this order."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from shared.bus.traces import Place, did
from shared.devices.protocols import SamplingWeights, Snapshot
from shared.errors import Unavailable
from shared.messages.contracts import ObjectRef, Policy, TrainGroup
from shared.process.failpoints import reach
from shared.process.worker import RETRY_S, WorkerContext
from shared.run.checkpoints import Resumption, add_checkpoint, store_commands
from shared.run.commits import CommitRecord, TrainedGroup, commit, stored_digest
from shared.run.layout import checkpoints_folder, weights_folder
from shared.run.shards import store_manifest, store_version_parts
from shared.store import ObjectStore
from shared.telemetry import STAGE_SECONDS

T = TypeVar("T")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class NewVersion:
    """Weights that an optimizer step has made of its parent; the first version has none."""

    weights: Snapshot
    parent: CommitRecord | None = None
    trained: tuple[TrainedGroup, ...] = ()
    metrics: dict[str, float] | None = None
    began: float | None = None
    """Monotonic seconds at the beginning of its optimizer step."""
    commands: tuple[TrainGroup, ...] = ()
    """What was sent of the groups."""
    with_states: bool = True
    """Whether its commit waits for the optimizer's state."""

    @property
    def policy(self) -> Policy:
        version = 0 if self.parent is None else self.parent.policy.version + 1
        sampling = self.weights.sampling or self.weights
        return Policy(version=version, weights_digest=sampling.digest)


class Versions:
    def __init__(self, context: WorkerContext) -> None:
        self._bus = context.bus
        self._store = context.store
        self._worker = context.worker
        self.resumption: Resumption | None = None
        """The newest version whose optimizer state is stored."""

    async def publish(self, new: NewVersion) -> CommitRecord:
        """Raises CommitConflict if the version exists already."""
        record = await self.commit(new)
        assert new.began is not None
        seconds = time.monotonic() - new.began
        STAGE_SECONDS.labels(stage="commit").observe(seconds)
        await self.announce(record, seconds)
        for group in new.trained:
            place = Place(new.policy.version - 1, group.group)
            did("commit", place, seconds=seconds, version=new.policy.version)
        return record

    async def commit(self, new: NewVersion) -> CommitRecord:
        """Raises CommitConflict if the version exists already."""
        run, snapshot = self._bus.run, new.weights
        states = snapshot if new.with_states else None
        commands_of = None if new.with_states else new.commands
        reach("commit.before-weights")
        (trained, other), checkpoint, commands = await asyncio.gather(
            self._stored(partial(store_sets, self._store, run, snapshot)),
            self._stored(partial(_if, states, partial(store_states, self._store, run))),
            self._stored(partial(_if, commands_of, self._store_commands)),
        )
        version, metrics = new.policy.version, new.metrics or {}
        at = self.resumption if checkpoint is None else Resumption(version, checkpoint)
        assert at is not None, "the first version is stored with its states"
        record = CommitRecord(
            run=run,
            policy=new.policy,
            parent=await self._digest_of(new.parent),
            weights=other or trained,
            trained_digest=snapshot.digest if other else None,
            trained_weights=trained if other else None,
            checkpoint=at.checkpoint,
            checkpoint_version=None if at.version == version else at.version,
            commands=commands,
            trained=new.trained,
            metrics=metrics,
            worker=self._worker.address,
        )
        reach("commit.before-record")
        await self._stored(partial(commit, self._store, record))
        reach("commit.after-record")
        if checkpoint is not None:  # otherwise newer states may have been stored meanwhile
            self.resumption = at
        log.info("committed", version=version, **metrics)
        return record

    async def _stored(self, work: Callable[[], Awaitable[T]]) -> T:
        """Store something, over outages of the store: what was made is not lost, and the status
        says what is waited for. Storing it twice is storing it once."""
        while True:
            try:
                return await work()
            except Unavailable as error:
                log.error("store_unavailable", error=str(error))
                with self._worker.saying(f"waits for the store: {error}"[:4000]):
                    await asyncio.sleep(RETRY_S)

    async def _store_commands(self, commands: tuple[TrainGroup, ...]) -> ObjectRef:
        batch = commands[0].batch
        return await store_commands(self._store, self._bus.run, batch, commands)

    async def store_again(self, snapshot: Snapshot) -> None:
        """Store weights once more that are damaged in the store: they have the same names."""
        await store_sets(self._store, self._bus.run, snapshot)

    async def add_states(self, record: CommitRecord, snapshot: Snapshot) -> None:
        """Store the optimizer's state of a committed version, and say that it is complete."""
        reach("commit.before-states")
        storing = partial(store_states, self._store, self._bus.run, snapshot)
        checkpoint = await self._stored(storing)
        reach("commit.before-states-record")
        await self._stored(partial(add_checkpoint, self._store, record, checkpoint))
        reach("commit.after-states-record")
        if self.resumption is None or self.resumption.version < record.policy.version:
            self.resumption = Resumption(record.policy.version, checkpoint)
        log.info("checkpoint_stored", version=record.policy.version)

    async def _digest_of(self, parent: CommitRecord | None) -> str | None:
        if parent is None:
            return None
        return await stored_digest(self._store, self._bus.run, parent.policy.version, parent)

    async def announce(self, record: CommitRecord, seconds: float = 0.0) -> None:
        self._worker.policy_version = record.policy.version
        await self._bus.publish(record.announcement(worker=self._worker.address, seconds=seconds))
        reach("commit.after-announcement")


async def store_version(
    store: ObjectStore, run: str, snapshot: Snapshot
) -> tuple[ObjectRef, ObjectRef]:
    """Store all of a version; return its trained weights and its checkpoint."""
    (trained, _), checkpoint = await asyncio.gather(
        store_sets(store, run, snapshot), store_states(store, run, snapshot)
    )
    return trained, checkpoint


async def store_sets(
    store: ObjectStore, run: str, snapshot: Snapshot
) -> tuple[ObjectRef, ObjectRef | None]:
    """Store the trained weights, and those that sample if they are others."""
    return await asyncio.gather(
        store_weights(store, run, snapshot),
        _if(snapshot.sampling, partial(_store_sampling, store, run)),
    )


async def store_weights(store: ObjectStore, run: str, snapshot: Snapshot) -> ObjectRef:
    """Store the trained weights, all ranks at once, and then what names their shards."""
    parts = await asyncio.gather(
        store_version_parts(store, run, snapshot.weights, ()),
        *(store_elsewhere("weights") for store_elsewhere in snapshot.elsewhere),
    )
    shards = [shard for each in parts for shard in each.weights]
    return await store_manifest(store, weights_folder(run), shards, snapshot.digest)


async def store_states(store: ObjectStore, run: str, snapshot: Snapshot) -> ObjectRef:
    """Store the optimizer's state, as `store_weights` does."""
    parts = await asyncio.gather(
        store_version_parts(store, run, (), snapshot.checkpoint),
        *(store_elsewhere("checkpoint") for store_elsewhere in snapshot.elsewhere),
    )
    shards = [shard for each in parts for shard in each.checkpoint]
    return await store_manifest(store, checkpoints_folder(run), shards, snapshot.digest)


async def _if(given: T | None, store: Callable[[T], Awaitable[ObjectRef]]) -> ObjectRef | None:
    return None if given is None else await store(given)


async def _store_sampling(store: ObjectStore, run: str, sampling: SamplingWeights) -> ObjectRef:
    stored = await store_version_parts(store, run, sampling.weights, ())
    return await store_manifest(store, weights_folder(run), stored.weights, sampling.digest)
