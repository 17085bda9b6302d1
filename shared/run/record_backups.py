"""Copies of small records that a run cannot do without, and whether a record is what it was.

A commit record is the only copy of its facts, and the next one names it by its digest: a damaged
byte in it breaks the chain. It ends with a seal, the digest of all before, by which damage shows;
the scheduler keeps a copy, which takes the place of a damaged record alone (`commits.py`). A reader
that finds damage reports it; `digenrl repair` restores the record.

The recipe and the digests of files have no seal: a record that is not what its copy is, is damaged.
"""

import hashlib
import re
import zlib

import structlog

from shared.errors import ContractError
from shared.limits import MAX_RECORD_BYTES
from shared.run.layout import commit_key, copy_key, named_objects
from shared.store import ObjectStore
from shared.telemetry import CORRUPT

_SEAL = re.compile(rb',"seal":"([0-9a-f]{64})"}\Z')

log = structlog.get_logger()


def sealed(record: bytes) -> bytes:
    """Return a record in JSON with its seal."""
    return record[:-1] + b',"seal":"%s"}' % record_digest(record).encode()


def unsealed(stored: bytes) -> bytes:
    """Return a record without its seal; one of an earlier release has none.

    Raises:
        ContractError: if the record does not match its seal.
    """
    seal = _SEAL.search(stored)
    if seal is not None and record_digest(stored) != seal[1].decode():
        raise ContractError("a byte of the record is not what it was")
    return _SEAL.sub(b"}", stored)


def record_digest(stored: bytes) -> str:
    """Return the digest of a record's bytes without its seal, by which the next record names it:
    another release could encode it differently."""
    return hashlib.sha256(_SEAL.sub(b"}", stored)).hexdigest()


async def keep_copy(store: ObjectStore, run: str, version: int, digest: str) -> None:
    """Copy the record of a version, unless it does not match ``digest``, or has a copy."""
    name = f"{version:08d}"
    if digest in await valid_copies(store, run, name):
        return
    data = await store.read(commit_key(run, version))
    if data is not None and record_digest(data) == digest:
        await _copy(store, run, name, data)


async def valid_copies(store: ObjectStore, run: str, name: str) -> dict[str, bytes]:
    """Return the copies of a record that match their names, by digest."""
    copies = {}
    for key, parts in (await named_objects(store, run, "copies", name)).items():
        data = _unpacked(await store.read(key) or b"")
        if record_digest(data) == parts["digest"]:
            copies[parts["digest"]] = data
    return copies


async def create_kept(store: ObjectStore, run: str, name: str, data: bytes) -> None:
    """Store a record, unless it exists, with a copy: the copy goes first, since a process killed
    between the two would leave a record without a copy."""
    await _copy(store, run, name, data)
    await store.create(_key(run, name), data)


async def write_kept(store: ObjectStore, run: str, name: str, data: bytes) -> None:
    """Store a record in place of another, with a copy."""
    copy = await _copy(store, run, name, data)  # first: a record without its copy counts as damaged
    await store.write(_key(run, name), data)
    copies = await named_objects(store, run, "copies", name)
    await store.delete([key for key in copies if key != copy])


async def read_kept(store: ObjectStore, run: str, name: str) -> bytes | None:
    """Return a record's bytes, or its copy's if it is damaged; None without either.

    If two processes stored different records at once, each has left a copy, and a damaged record
    could be either: its bytes are returned unchanged.
    """
    data = await store.read(_key(run, name))
    copies = {} if data is None else await valid_copies(store, run, name)
    if data is None or len(copies) != 1 or record_digest(data) in copies:
        return data
    note_damage(run, _key(run, name), name.partition("/")[0])
    return next(iter(copies.values()))


def note_damage(run: str, key: str, what: str) -> None:
    """Report a damaged record whose copy is used."""
    CORRUPT.labels(what=what).inc()
    remedy = f"digenrl repair {run} --apply"
    log.error(f"{what}_record_damaged", key=key, then="its copy is used", remedy=remedy)


def damaged(run: str, key: str) -> ContractError:
    """Return the error of a record that is damaged and has no copy."""
    remedy = f"stop the run, and digenrl repair {run} --apply moves it away, to be stored again"
    return ContractError(f"{key} is damaged, or not of this release, and has no copy; {remedy}")


async def _copy(store: ObjectStore, run: str, name: str, data: bytes) -> str:
    key = copy_key(run, name, record_digest(data))
    await store.create(key, zlib.compress(data))
    return key


def _key(run: str, name: str) -> str:
    return f"{run}/{name}.json"


def _unpacked(data: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        return unpacking.decompress(data, MAX_RECORD_BYTES)
    except zlib.error:
        return b""
