"""Stores what a version is: its trained weights, those that sample, and the optimizer's state."""

import asyncio

from shared.devices.protocols import SamplingWeights, Snapshot
from shared.messages.contracts import ObjectRef
from shared.run.layout import checkpoints_folder, weights_folder
from shared.run.shards import store_manifest, store_version_parts
from shared.store import ObjectStore


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
    if snapshot.sampling is None:
        return await store_weights(store, run, snapshot), None
    return await asyncio.gather(
        store_weights(store, run, snapshot), _store_sampling(store, run, snapshot.sampling)
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


async def _store_sampling(store: ObjectStore, run: str, sampling: SamplingWeights) -> ObjectRef:
    stored = await store_version_parts(store, run, sampling.weights, ())
    return await store_manifest(store, weights_folder(run), stored.weights, sampling.digest)
