"""Stores a version's weights and checkpoint in shards, and reads them: the one door for both."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from shared.errors import ContractError, IntegrityError
from shared.limits import MAX_MANIFEST_BYTES
from shared.messages.contracts import ObjectRef
from shared.run.layout import checkpoints_folder, weights_folder
from shared.run.manifest import (
    MANIFEST,
    SHARD,
    FetchedObject,
    Manifest,
    Shard,
    StoredParts,
    VersionTensors,
    WantsTensor,
    is_manifest,
    read_manifest,
)
from shared.store import ObjectStore
from shared.store.tensor_header import Data

PUTS_AT_ONCE = 4
"""Shards that are digested and sent at a time: one core digests 1.5 GB/s and a store may take more;
on two cores, some wait for the disk while others are digested."""


async def store_version_parts(
    store: ObjectStore,
    run: str,
    weights: Sequence[VersionTensors],
    checkpoint: Sequence[VersionTensors],
) -> StoredParts:
    """Pack and store what this process has of a version."""
    limit = asyncio.Semaphore(PUTS_AT_ONCE)
    stored = await asyncio.gather(
        _store_parts(store, weights_folder(run), weights, limit),
        _store_parts(store, checkpoints_folder(run), checkpoint, limit),
    )
    return StoredParts(weights=stored[0], checkpoint=stored[1])


async def _store_parts(
    store: ObjectStore, folder: str, parts: Iterable[VersionTensors], limit: asyncio.Semaphore
) -> tuple[Shard, ...]:
    async def put(part: VersionTensors) -> Shard:
        async with limit:
            data = await asyncio.to_thread(part.pack)
            ref = await store.put(folder, data, suffix=SHARD)
        return Shard(object=ref, pieces=dict(part.pieces))

    return tuple(await asyncio.gather(*map(put, parts)))


async def store_manifest(
    store: ObjectStore, folder: str, shards: Sequence[Shard], weights_digest: str
) -> ObjectRef:
    """Store the manifest of these shards, which are stored, and return what names the version's
    part: one shard alone needs no manifest.

    Raises:
        ContractError: if the shards do not make up whole tensors.
    """
    if len(shards) == 1:
        return shards[0].object
    try:
        manifest = Manifest(weights_digest=weights_digest, shards=tuple(shards))
    except ValidationError as error:
        raise ContractError(f"these shards are no version: {str(error)[:200]}") from error
    return await store.put(folder, manifest.encode(), suffix=MANIFEST)


@dataclass(frozen=True, slots=True)
class StoredShards:
    """Implements `StoredTensors`."""

    ref: ObjectRef
    store: ObjectStore
    shards: tuple[Shard, ...] | None
    """Shards of its manifest, None if it is one object."""
    weights_digest: str | None = None

    async def parts(self, wanted: WantsTensor | None = None) -> AsyncIterator[FetchedObject]:
        """Fetch one object after the other; the next one is fetched while this one is used, so that
        two are in memory."""
        if self.shards is None:
            yield FetchedObject(await self.store.get_shared(self.ref), None)
            return
        shards = [each for each in self.shards if wanted is None or _has(each, wanted)]
        fetching: asyncio.Task[Data] | None = None
        try:
            for number, shard in enumerate(shards):
                data = await (fetching or self.store.get_shared(shard.object))
                following = shards[number + 1 : number + 2]
                fetching = None
                for each in following:
                    fetching = asyncio.create_task(self.store.get_shared(each.object))
                yield FetchedObject(data, shard.pieces)
                del data  # or it would be held beside the next two
        finally:
            if fetching is not None:
                fetching.cancel()


def _has(shard: Shard, wanted: WantsTensor) -> bool:
    return any(wanted(name, piece) for name, piece in shard.pieces.items())


async def open_tensors(
    store: ObjectStore, ref: ObjectRef, weights_digest: str | None = None
) -> StoredShards:
    """Open what a commit record names: weights or a checkpoint.

    ``weights_digest``: digest of the weights; a checkpoint has the digest of the trained ones.

    Raises:
        IntegrityError: if it is missing, differs from its reference, or belongs to other
            weights.
        ContractError: if it is no manifest.
    """
    if not is_manifest(ref):
        return StoredShards(ref, store, None, weights_digest)
    if ref.size > MAX_MANIFEST_BYTES:
        raise ContractError(f"{ref.key} is too large for a manifest: {ref.size} bytes")
    manifest = read_manifest(await store.get(ref), ref.key)
    if weights_digest not in (None, manifest.weights_digest):
        raise IntegrityError(f"{ref.key} belongs to weights {manifest.weights_digest[:12]}")
    return StoredShards(ref, store, manifest.shards, weights_digest)
