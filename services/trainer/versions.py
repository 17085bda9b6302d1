"""Makes new weights a policy version: store them, commit, then announce it, in this order."""

import asyncio
import time
from dataclasses import dataclass

import structlog

from shared.devices.protocols import SamplingWeights, Snapshot
from shared.messages.contracts import ObjectRef, Policy, PolicyPublished
from shared.process.worker import WorkerContext
from shared.run.commits import CommitRecord, TrainedGroup, commit, stored_digest
from shared.run.layout import checkpoints_folder, weights_folder
from shared.run.shards import store_manifest, store_version_parts
from shared.store import ObjectStore
from shared.telemetry import STAGE_SECONDS

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

    async def publish(self, new: NewVersion) -> CommitRecord:
        """Raises CommitConflict if the version exists already."""
        record = await self.commit(new)
        assert new.began is not None
        seconds = time.monotonic() - new.began
        STAGE_SECONDS.labels(stage="commit").observe(seconds)
        await self.announce(record, seconds)
        return record

    async def commit(self, new: NewVersion) -> CommitRecord:
        """Raises CommitConflict if the version exists already."""
        run, sampling = self._bus.run, new.weights.sampling
        trained, checkpoint = await store_version(self._store, run, new.weights)
        lags = sampling is not None
        weights = await store_sampling(self._store, run, sampling) if sampling else trained
        metrics = new.metrics or {}
        record = CommitRecord(
            run=self._bus.run,
            policy=new.policy,
            parent=await self._digest_of(new.parent),
            weights=weights,
            trained_digest=new.weights.digest if lags else None,
            trained_weights=trained if lags else None,
            checkpoint=checkpoint,
            trained=new.trained,
            metrics=metrics,
            worker=self._worker.address,
        )
        await commit(self._store, record)
        log.info("committed", version=new.policy.version, **metrics)
        return record

    async def _digest_of(self, parent: CommitRecord | None) -> str | None:
        if parent is None:
            return None
        return await stored_digest(self._store, self._bus.run, parent.policy.version)

    async def announce(self, record: CommitRecord, seconds: float = 0.0) -> None:
        self._worker.policy_version = record.policy.version
        await self._bus.publish(
            PolicyPublished(
                policy=record.policy,
                weights=record.weights,
                worker=self._worker.address,
                seconds=seconds,
            )
        )


async def store_version(
    store: ObjectStore, run: str, snapshot: Snapshot
) -> tuple[ObjectRef, ObjectRef]:
    """Store the trained weights and the checkpoint, all ranks at once, and then what names their
    shards; return what the commit record names."""
    parts = await asyncio.gather(
        store_version_parts(store, run, snapshot.weights, snapshot.checkpoint),
        *(store_elsewhere() for store_elsewhere in snapshot.elsewhere),
    )
    weights = [shard for each in parts for shard in each.weights]
    checkpoint = [shard for each in parts for shard in each.checkpoint]
    return await asyncio.gather(
        store_manifest(store, weights_folder(run), weights, snapshot.digest),
        store_manifest(store, checkpoints_folder(run), checkpoint, snapshot.digest),
    )


async def store_sampling(store: ObjectStore, run: str, sampling: SamplingWeights) -> ObjectRef:
    """Store the weights that generate, where they are not the trained ones."""
    stored = await store_version_parts(store, run, sampling.weights, ())
    return await store_manifest(store, weights_folder(run), stored.weights, sampling.digest)
