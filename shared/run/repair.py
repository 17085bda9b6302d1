"""Finds what is damaged of a stopped run, and mends it: damaged objects are moved to the run's
quarantine, and commit records are put back from their copies.

Objects are named by their digest, so a damaged one shows. A commit record is compared with its copy
(`copies.py`), and with the one after it, which names its digest. Everything else that is kept as
JSON must be JSON; it is made again where it is missing.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from shared.errors import UserError
from shared.run.commits import CommitRecord, record_digest
from shared.run.copies import copies_of
from shared.run.layout import commit_key, commits_folder, quarantine_key
from shared.store import ObjectStore
from shared.store.objects import StoredObject

NAMED = re.compile(r"/([0-9a-f]{64})[^/]*\Z")
"""Matches the key of an object that is named by its content."""
LEFT_ALONE = ("commits", "copies", "quarantine", "epochs")
"""Folders of a run that are looked at otherwise, or not at all."""
THEN = {
    "weights": "a trainer goes back to an older version and makes it again, if it can",
    "checkpoints": "a trainer goes back to an older optimizer state",
    "states": "a trainer goes back to an older optimizer state",
    "chain": "it is made again from the commit records",
    "conditions": "they are encoded again",
    "batches": "what needs it is generated again, or an older optimizer state is used",
    "recipe.json": "start the scheduler with the run's recipe, which is stored again",
    "dead": "nobody is told of it any more",
    "journal": "nobody is told of it any more",
    "evaluations": "the version is evaluated again",
}
"""Folder, or object, of a run -> what follows when a damaged object of it is gone."""

Remedy = Literal["put back", "move", "none"]


@dataclass(frozen=True, slots=True)
class Damage:
    key: str
    what: str
    remedy: Remedy
    then: str
    """What follows once it is mended; or what a person can do."""
    data: bytes = b""
    """What it is to be, if it is put back."""


async def find_damage(store: ObjectStore, run: str) -> list[Damage]:
    """Return what is damaged; it reads everything that is stored of the run.

    Raises:
        UserError: if the store holds no such run.
    """
    entries = await store.entries(run)
    if not entries:
        raise UserError(f"--run: the store holds no run {run!r}")
    found = await _records(store, run)
    return found + [each async for each in _objects(store, run, entries)]


async def mend(store: ObjectStore, run: str, damage: Damage) -> None:
    """Move a damaged object to the quarantine, and put back what it was, if that is known."""
    if damage.remedy == "none":
        return
    data = await store.read(damage.key)
    if data is not None:
        await store.write(quarantine_key(run, damage.key), data)
    if damage.remedy == "put back":
        await store.write(damage.key, damage.data)
    else:
        await store.delete([damage.key])


async def _records(store: ObjectStore, run: str) -> list[Damage]:
    keys = await store.keys(commits_folder(run))
    count = 1 + max((_version(key) for key in keys), default=-1)
    found, parent = list[Damage](), None
    for version in range(count):
        key, data = commit_key(run, version), await store.read(commit_key(run, version))
        copies = await copies_of(store, run, version)
        if copies and (data is None or record_digest(data) not in copies):
            data = next(iter(copies.values()))
            what = "the record is missing, or not what its copy is"
            found.append(Damage(key, what, "put back", "the chain is whole again", data))
        record = _record(data)
        if data is None or record is None or record.parent != parent:
            found.append(_broken(run, version, is_newest=version == count - 1, named=record))
        parent = None if data is None else record_digest(data)
    return found


def _broken(run: str, version: int, *, is_newest: bool, named: CommitRecord | None) -> Damage:
    what = "no commit record" if named is None else "it does not name the record before it"
    if is_newest and version:
        then = f"the run goes on from version {version - 1}, and trains that batch again"
        return Damage(commit_key(run, version), what, "move", then)
    backup = "put it, or the one before it, back from a backup of the store; it has no copy"
    return Damage(commit_key(run, version), what, "none", backup)


def _record(data: bytes | None) -> CommitRecord | None:
    try:
        return None if data is None else CommitRecord.model_validate_json(data)
    except ValidationError:
        return None


def _version(key: str) -> int:
    return int(key.rsplit("/", 1)[1].removesuffix(".json"))


async def _objects(
    store: ObjectStore, run: str, entries: Sequence[StoredObject]
) -> AsyncIterator[Damage]:
    for entry in entries:
        folder = entry.key.removeprefix(f"{run}/").split("/", 1)[0]
        if folder in LEFT_ALONE:
            continue
        named = NAMED.search(entry.key)
        if named is not None and "/by/" not in entry.key:
            if await _digest(store, entry.key) != named[1]:
                yield Damage(
                    entry.key, "its bytes are not what its name says", "move", _then(folder)
                )
        elif entry.key.endswith(".json"):
            data = await store.read(entry.key)
            if data is not None and not await asyncio.to_thread(_is_json, data):
                yield Damage(entry.key, "it is no JSON", "move", _then(folder))


async def _digest(store: ObjectStore, key: str) -> str:
    digest = hashlib.sha256()
    async for chunk in store.backend.stream(key, 0):
        await asyncio.to_thread(digest.update, chunk)
    return digest.hexdigest()


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _then(folder: str) -> str:
    return THEN.get(folder, "it is missing from then on")
