"""Finds damaged objects of a stopped run, and repairs the run: damaged objects are moved to the
run's quarantine, and commit records are restored from their copies.

Objects are named by their digest, so a damaged one shows. A commit record is compared with its seal
and its copy (`record_backups.py`), and with the next record, which names its digest. Every other
record is read by its own model. An object with an invalid name for its folder is moved away
as well.
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
"""Matches the key of an object that is named by its content."""
EXCLUDED_FOLDERS = ("commits", "copies", "quarantine", "epochs")
"""Folders of a run that are looked at otherwise, or not at all."""
CONSEQUENCE = {
    "weights": "members go back to an older version and make it again, if they can",
    "checkpoints": "members go back to an older version and make it again, if they can",
    "chain": "it is made again from the commit records",
    "conditions": "they are encoded again",
    "batches": "what needs it is generated again, or an older version is used",
    "recipe.json": "start the scheduler with the run's recipe, which is stored again",
    "files": "the next process that has the file stores it again",
    "log": "no reader gets it any more",
    "evaluations": "the version is evaluated again",
}
"""Folder, or object, of a run -> what follows when a damaged object of it is gone."""
MISSING_TEXT = "it is missing from then on"
BACKED_UP = ("recipe.json", "files")

Parsers = Mapping[str, Callable[[bytes], object]]
PARSERS: Parsers = {
    r"recipe\.json": parsed_recipe,
    r"files/libraries\..*": LibrariesRecord.model_validate_json,
    r"files/(?!first-version\.|created-once\.).*": FileRecord.model_validate_json,
    r"chain/.*": Segment.model_validate_json,
    r"conditions/by/.*": ConditionsRecord.model_validate_json,
    r"(?:evaluations/)?log/.*": ENTRY.validate_json,
}
"""Matches names of a run's records, the first of which counts -> reads one by its model."""

Remedy = Literal["put back", "move", "none"]


@dataclass(frozen=True, slots=True)
class DamagedObject:
    key: str
    what: str
    remedy: Remedy
    then: str
    """Consequence of the repair, or what a person can do."""
    data: bytes = b""
    """Restored content, if it is restored."""


async def find_damage(
    store: ObjectStore, run: str, more: Parsers = MappingProxyType({})
) -> list[DamagedObject]:
    """Return what is damaged; it reads everything that is stored of the run.

    Args:
        more: parsers of records that only rooms above this one know, as in `PARSERS`.

    Raises:
        UserError: if the store holds no such run.
    """
    entries = await store.entries(run)
    if not entries:
        raise UserError(f"--run: the store holds no run {run!r}")
    found = await _records(store, run)
    return found + [each async for each in _objects(store, run, entries, more)]


async def mend(store: ObjectStore, run: str, damage: DamagedObject) -> None:
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


async def _records(store: ObjectStore, run: str) -> list[DamagedObject]:
    count = 1 + max(await numbers_in(store, run, "commits"), default=-1)
    found, parent = list[DamagedObject](), None
    for version in range(count):
        key, data = commit_key(run, version), await store.read(commit_key(run, version))
        whole = await whole_bytes(store, run, version, data)
        if whole is not None and whole != data:
            what = "the record is missing, or not what its copy is"
            found.append(DamagedObject(key, what, "put back", "the chain is whole again", whole))
        stored = None if whole is None else decoded(whole, run, version)
        if stored is None or stored.record.parent != parent:
            found.append(_broken(run, version, is_newest=version == count - 1, named=stored))
        parent = None if stored is None else stored.digest
    return found


def _broken(
    run: str, version: int, *, is_newest: bool, named: StoredRecord | None
) -> DamagedObject:
    what = "no commit record" if named is None else "it does not name the record before it"
    if is_newest and version:
        then = f"the run goes on from version {version - 1}, and trains that batch again"
        return DamagedObject(commit_key(run, version), what, "move", then)
    backup = "put it, or the one before it, back from a backup of the store; it has no copy"
    return DamagedObject(commit_key(run, version), what, "none", backup)


async def _objects(
    store: ObjectStore, run: str, entries: Sequence[StoredObject], more: Parsers
) -> AsyncIterator[DamagedObject]:
    for entry in entries:
        name = entry.key.removeprefix(f"{run}/")
        folder, named = name.split("/", 1)[0], CONTENT_KEY.search(entry.key)
        if folder in NAMES and parse_name(run, folder, entry.key) is None:
            what = "no object of this folder has such a name"
            yield DamagedObject(entry.key, what, "move", "nothing: nobody reads it")
        elif folder in EXCLUDED_FOLDERS:
            continue
        elif named is not None and "/by/" not in entry.key:
            if await _digest(store, entry.key) not in (None, named[1]):
                what = "its bytes are not what its name says"
                yield DamagedObject(entry.key, what, "move", CONSEQUENCE.get(folder, MISSING_TEXT))
        elif name.endswith(".json") and (found := await _fault(store, run, name, more)) is not None:
            yield found


async def _digest(store: ObjectStore, key: str) -> str | None:
    """Return the digest of an object's bytes; None if it was deleted since it was listed."""
    digest = hashlib.sha256()
    with contextlib.suppress(IntegrityError):
        async for chunk in store.backend.stream(key, 0):
            await asyncio.to_thread(digest.update, chunk)
        return digest.hexdigest()
    return None


async def _fault(store: ObjectStore, run: str, name: str, more: Parsers) -> DamagedObject | None:
    """Return what is wrong with a record: it is not what its copy is, or not of its model."""
    key, folder = f"{run}/{name}", name.split("/", 1)[0]
    data = await store.read(key)
    if data is None:  # deleted since it was listed
        return None
    copies = (
        await valid_copies(store, run, name.removesuffix(".json")) if folder in BACKED_UP else {}
    )
    if copies and record_digest(data) not in copies:
        copy = next(iter(copies.values()))
        return DamagedObject(
            key, "it is not what its copy is", "put back", "it is what it was", copy
        )
    parsers = {**more, **PARSERS}
    parse = next((parsers[each] for each in parsers if re.fullmatch(each, name)), json.loads)
    try:
        await asyncio.to_thread(parse, data)
    except (ValueError, DigenRLError, RecursionError):
        return DamagedObject(
            key, "it is no record of its kind", "move", CONSEQUENCE.get(folder, MISSING_TEXT)
        )
    return None
