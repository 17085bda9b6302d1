"""Finds damaged objects of a stopped run and repairs the run: it moves damaged objects to the run's
quarantine and restores commit records from their copies.

Most objects are named by their digest, which is compared with their bytes. A commit record is
compared with its seal, with its copy (`record_backups.py`), and with the digest in the next commit
record. Every other record is parsed by its model. An object with an invalid name is moved as well.
"""

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from shared.errors import DigenRLError, IntegrityError, UserError
from shared.run.chain import Segment
from shared.run.commits import StoredRecord, decoded, whole_bytes
from shared.run.conditions import ConditionsRecord
from shared.run.files import FileRecord, LibrariesRecord
from shared.run.layout import NAMES, commit_key, numbers_in, parse_name, quarantine_key
from shared.run.log_entries import ENTRY
from shared.run.record_backups import record_digest, valid_copies
from shared.run.run_recipe import parsed_recipe
from shared.store import ObjectStore
from shared.store.backend import StoredObject

CONTENT_KEY = re.compile(r"/([0-9a-f]{64})[^/]*\Z")
"""Matches the key of an object that is named by its digest."""
EXCLUDED_FOLDERS = ("commits", "copies", "quarantine", "epochs")
"""Folders of a run whose objects are checked elsewhere, or not checked."""
CONSEQUENCE = {
    "weights": "members recompute the version from an older one, if possible",
    "checkpoints": "members recompute the version from an older one, if possible",
    "chain": "the scheduler rebuilds it from the commit records",
    "conditions": "the prompts are encoded again",
    "batches": "its samples are generated again, or an older version is used",
    "recipe.json": "start the scheduler with the run's recipe, which it stores again",
    "files": "the next process that has the file stores it again",
    "log": "readers no longer receive the entry",
    "evaluations": "the version is evaluated again",
}
"""Folder, or object, of a run -> consequence of removing a damaged object."""
DEFAULT_CONSEQUENCE = "the object is missing afterwards"
COPIED = ("recipe.json", "files")
"""Folders and objects, except commit records, that have copies."""

Parsers = Mapping[str, Callable[[bytes], object]]
PARSERS: Parsers = {
    r"recipe\.json": parsed_recipe,
    r"files/libraries\..*": LibrariesRecord.model_validate_json,
    r"files/(?!first-version\.|created-once\.).*": FileRecord.model_validate_json,
    r"chain/.*": Segment.model_validate_json,
    r"conditions/by/.*": ConditionsRecord.model_validate_json,
    r"(?:evaluations/)?log/.*": ENTRY.validate_json,
}
"""Pattern of a record's name -> its parser; the first matching pattern applies."""

Remedy = Literal["put back", "move", "none"]


@dataclass(frozen=True, slots=True)
class DamagedObject:
    key: str
    fault: str
    remedy: Remedy
    consequence: str
    """Consequence of the remedy; without one, advice for a person."""
    data: bytes = b""
    """Content to restore, for the remedy "put back"."""


async def find_damage(
    store: ObjectStore, run: str, parsers: Parsers = MappingProxyType({})
) -> list[DamagedObject]:
    """Return all damaged objects; reads every object of the run.

    Args:
        parsers: parsers of further records, for models in rooms above this one.

    Raises:
        UserError: if the store does not hold the run.
    """
    entries = await store.entries(run)
    if not entries:
        raise UserError(f"--run: the store does not hold a run {run!r}")
    records = await _damaged_commits(store, run)
    return records + [each async for each in _damaged_objects(store, run, entries, parsers)]


async def apply_remedy(store: ObjectStore, run: str, damage: DamagedObject) -> None:
    """Move a damaged object to the quarantine, and restore its content from a copy, if any."""
    if damage.remedy == "none":
        return
    data = await store.read(damage.key)
    if data is not None:
        await store.write(quarantine_key(run, damage.key), data)
    if damage.remedy == "put back":
        await store.write(damage.key, damage.data)
    else:
        await store.delete([damage.key])


async def _damaged_commits(store: ObjectStore, run: str) -> list[DamagedObject]:
    count = 1 + max(await numbers_in(store, run, "commits"), default=-1)
    damaged, parent = list[DamagedObject](), None
    for version in range(count):
        key, data = commit_key(run, version), await store.read(commit_key(run, version))
        intact = await whole_bytes(store, run, version, data)
        if intact is not None and intact != data:
            fault = "the record is missing, or differs from its copy"
            damaged.append(DamagedObject(key, fault, "put back", "the chain is complete", intact))
        stored = None if intact is None else decoded(intact, run, version)
        if stored is None or stored.record.parent != parent:
            is_newest = version == count - 1
            damaged.append(_broken_link(run, version, is_newest=is_newest, stored=stored))
        parent = None if stored is None else stored.digest
    return damaged


def _broken_link(
    run: str, version: int, *, is_newest: bool, stored: StoredRecord | None
) -> DamagedObject:
    """Return the damage of a record that is unreadable, or does not name its predecessor."""
    key = commit_key(run, version)
    fault = "it is not a commit record" if stored is None else "it does not name its predecessor"
    if is_newest and version:
        consequence = f"the run resumes from version {version - 1} and trains that batch again"
        return DamagedObject(key, fault, "move", consequence)
    advice = "it has no copy: restore it, or its predecessor, from a backup of the store"
    return DamagedObject(key, fault, "none", advice)


async def _damaged_objects(
    store: ObjectStore, run: str, entries: Sequence[StoredObject], parsers: Parsers
) -> AsyncIterator[DamagedObject]:
    for entry in entries:
        name = entry.key.removeprefix(f"{run}/")
        folder, content_key = name.split("/", 1)[0], CONTENT_KEY.search(entry.key)
        if folder in NAMES and parse_name(run, folder, entry.key) is None:
            fault = "its name is not valid in this folder"
            yield DamagedObject(entry.key, fault, "move", "none: no process reads it")
        elif folder in EXCLUDED_FOLDERS:
            continue
        elif content_key is not None and "/by/" not in entry.key:
            if await _digest(store, entry.key) not in (None, content_key[1]):
                fault = "its bytes do not match the digest in its name"
                yield DamagedObject(entry.key, fault, "move", _consequence(folder))
        elif name.endswith(".json"):
            damaged = await _damaged_record(store, run, name, parsers)
            if damaged is not None:
                yield damaged


def _consequence(folder: str) -> str:
    return CONSEQUENCE.get(folder, DEFAULT_CONSEQUENCE)


async def _digest(store: ObjectStore, key: str) -> str | None:
    """Return the digest of an object's bytes; None if the object was deleted after the listing."""
    digest = hashlib.sha256()
    with contextlib.suppress(IntegrityError):
        async for chunk in store.backend.stream(key, 0):
            await asyncio.to_thread(digest.update, chunk)
        return digest.hexdigest()
    return None


async def _damaged_record(
    store: ObjectStore, run: str, name: str, parsers: Parsers
) -> DamagedObject | None:
    """Return the damage of a record that differs from its copy, or does not fit its model."""
    key, folder = f"{run}/{name}", name.split("/", 1)[0]
    data = await store.read(key)
    if data is None:  # deleted after the listing
        return None
    copies = await valid_copies(store, run, name.removesuffix(".json")) if folder in COPIED else {}
    if copies and record_digest(data) not in copies:
        copy = next(iter(copies.values()))
        return DamagedObject(
            key, "it differs from its copy", "put back", "the copy replaces it", copy
        )
    patterns = {**parsers, **PARSERS}
    parse = next((patterns[each] for each in patterns if re.fullmatch(each, name)), json.loads)
    try:
        await asyncio.to_thread(parse, data)
    except (ValueError, DigenRLError, RecursionError):
        return DamagedObject(key, "its model cannot parse it", "move", _consequence(folder))
    return None
