"""Copies of commit records, named by the digest of what they copy.

A record says what no other object does, and the next one names it by its digest: a damaged byte in
it breaks the chain. The scheduler keeps a copy of each. Whoever finds a record damaged reads the
copy, and says so; `digenrl repair` puts it back.
"""

import hashlib
import zlib

import structlog

from shared.run.layout import commit_key, copies_folder
from shared.store import ObjectStore
from shared.telemetry import CORRUPT

SUFFIX = ".z"
MAX_BYTES = 1 << 28

log = structlog.get_logger()


async def keep_copy(store: ObjectStore, run: str, version: int, digest: str) -> None:
    """Copy the record of a version, unless it is not what ``digest`` says, or there is a copy."""
    key = f"{copies_folder(run, version)}/{digest}{SUFFIX}"
    if key in await store.keys(copies_folder(run, version)):
        return
    data = await store.read(commit_key(run, version))
    if data is not None and hashlib.sha256(data).hexdigest() == digest:
        await store.create(key, zlib.compress(data))


async def copies_of(store: ObjectStore, run: str, version: int) -> dict[str, bytes]:
    """Return the copies of a record that are what their names say, by digest."""
    found = {}
    for key in await store.keys(copies_folder(run, version)):
        digest = key.rsplit("/", 1)[1].removesuffix(SUFFIX)
        data = _unpacked(await store.read(key) or b"")
        if hashlib.sha256(data).hexdigest() == digest:
            found[digest] = data
    return found


async def verified(store: ObjectStore, run: str, version: int, data: bytes) -> bytes:
    """Return a record's bytes: those that were read, unless there is a copy of other bytes."""
    copies = await copies_of(store, run, version)
    if not copies or hashlib.sha256(data).hexdigest() in copies:
        return data
    CORRUPT.labels(what="commit").inc()
    key, remedy = commit_key(run, version), f"digenrl repair {run} --apply"
    log.error("commit_record_damaged", key=key, then="its copy is used", remedy=remedy)
    return next(iter(copies.values()))


def _unpacked(data: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        return unpacking.decompress(data, MAX_BYTES)
    except zlib.error:
        return b""
