"""Deletable objects in a run's folder: left by killed processes, or missed by an absent scheduler.

An object that no record names may be one that a trainer, or an evaluator, is storing at this
moment: it is garbage only when it is older than any of them takes.
"""

import asyncio
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import ContractError, UserError
from shared.limits import SAFE_AGE_S
from shared.run.commands import oldest_needed_batch
from shared.run.commits import CommitRecord, commit_chain
from shared.run.evaluations import GoldFigures
from shared.run.layout import batch_folder, evaluations_folder, parse_name, stored_batches
from shared.run.retention import (
    Manifests,
    Retention,
    deletable,
    kept_now,
    named_by,
    retention_from,
    version_folders,
)
from shared.run.run_recipe import read_recipe
from shared.store import ObjectStore
from shared.store.backend import StoredObject


@dataclass(frozen=True, slots=True)
class DeletableObjects:
    """Objects of one kind."""

    kind: str
    found: Sequence[StoredObject]
    unfinished: bool = False
    """Whether these are no objects, but what a write has left that was interrupted."""

    @property
    def num_bytes(self) -> int:
        return sum(each.size for each in self.found)


async def find_garbage(
    store: ObjectStore, run: str, *, now: float, min_age: float = SAFE_AGE_S
) -> list[DeletableObjects]:
    """Return what may be deleted, in this order; ``now`` and ``min_age`` are in seconds.

    Raises:
        UserError: if the store holds no such run.
        IntegrityError: if the manifest of a version that is kept cannot be read.
    """
    recipe = await read_recipe(store, run)
    if recipe is None:
        raise UserError(f"--run: the store holds no run {run!r}")
    # Before the records are read: what is listed here, and is named by none of them, is an orphan.
    entries = [each for folder in version_folders(run) for each in await store.entries(folder)]
    media = await store.entries(evaluations_folder(run))
    chain = await commit_chain(store, run)
    garbage = [
        *await _versions(store, retention_from(recipe), chain, entries),
        DeletableObjects("of older batches", await _batches(store, run, chain)),
        DeletableObjects("pictures that no evaluation names", await _pictures(store, run, media)),
        DeletableObjects("interrupted writes", await store.unfinished(run), unfinished=True),
    ]
    old = [
        DeletableObjects(
            each.kind, [o for o in each.found if o.modified <= now - min_age], each.unfinished
        )
        for each in garbage
    ]
    return [each for each in old if each.found]


async def delete_garbage(store: ObjectStore, garbage: DeletableObjects) -> int:
    """Delete what was found, unless it was stored again meanwhile; return the number of objects."""
    if garbage.unfinished:
        await store.delete_unfinished(garbage.found)
        return len(garbage.found)
    folders = {each.key.rsplit("/", 1)[0] for each in garbage.found}
    unchanged = {each for folder in folders for each in await store.entries(folder)}
    keys = [each.key for each in garbage.found if each in unchanged]
    await store.delete(keys)
    return len(keys)


async def _versions(
    store: ObjectStore,
    retention: Retention,
    chain: Sequence[CommitRecord],
    entries: Sequence[StoredObject],
) -> list[DeletableObjects]:
    stored_keys = {each.key for each in entries}
    kept: set[int] = set()
    if chain:
        gold = GoldFigures(store, chain[0].run, retention.gold_weights)
        kept = await kept_now(retention, gold, chain[-1].policy.version)
    shards = await Manifests(store).shards(chain, stored_keys, kept)
    old_shards, old = deletable(chain, kept, shards)
    orphans = stored_keys - named_by(chain, shards)

    def of(keys: Collection[str]) -> list[StoredObject]:
        return [each for each in entries if each.key in keys]

    return [
        DeletableObjects("shards of versions that are not kept", of(old_shards)),
        DeletableObjects("weights and checkpoints of versions that are not kept", of(old)),
        DeletableObjects("weights and checkpoints that no commit names", of(orphans)),
    ]


async def _batches(
    store: ObjectStore, run: str, chain: Sequence[CommitRecord]
) -> list[StoredObject]:
    oldest = oldest_needed_batch(chain[-1]) if chain else 0
    old = [each for each in await stored_batches(store, run) if each < oldest]
    return [each for batch in old for each in await store.entries(batch_folder(run, batch))]


async def _pictures(
    store: ObjectStore, run: str, entries: Sequence[StoredObject]
) -> list[StoredObject]:
    """Return the media that no record of the same settings names. Records are read after the media
    are listed."""
    names = {each.key: parse_name(run, "evaluations", each.key) for each in entries}
    records = [key for key, name in names.items() if name and name["settings"]]
    media = [each for each in entries if each.key.rsplit("/", 2)[-2] == "media"]
    if not media:
        return []
    named: set[str] = set()
    for key in records:
        data = await store.read(key) or b"{}"
        try:
            named |= set(_keys(await asyncio.to_thread(json.loads, data)))
        except ValueError as error:
            raise ContractError(f"{key} is not an evaluation record") from error
    return [each for each in media if each.key not in named]


def _keys(value: Any) -> Iterator[str]:
    """Yield every key that a record names, wherever."""
    if isinstance(value, dict):
        if isinstance(value.get("key"), str):
            yield value["key"]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _keys(each)
