"""The object store as services see it: content-addressed writes, verified reads."""

import asyncio
import contextlib
import hashlib
import os
import re
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote_to_bytes, urlsplit

from shared.errors import ContractError, IntegrityError, UserError
from shared.messages.contracts import ObjectRef
from shared.store.backend import Backend, Content, StoredObject
from shared.store.folder import FolderBackend
from shared.store.settings import StoreSettings
from shared.store.tensor_header import Data
from shared.store.traffic import Traffic
from shared.telemetry import DIGESTED_BYTES

_KEY = re.compile(r"\A[A-Za-z0-9][A-Za-z0-9_.-]*(?:/[A-Za-z0-9][A-Za-z0-9_.-]*)*\Z")


BUCKETS = ("s3", "gs", "az")
"""URL schemes that name a bucket."""
THREAD_HASH_BYTES = 1 << 19
"""Size in bytes from which hashing takes longer than a hop to a thread."""
CONCURRENT_HASH_BYTES = 1 << 24
"""Size in bytes from which hashing runs concurrently with writing, since it takes so long."""


class SharedReads(Protocol):
    """Reads objects that other processes of this host read as well."""

    async def get(self, ref: ObjectRef, store: "ObjectStore") -> Data:
        """Do what `ObjectStore.get` does."""


@dataclass(frozen=True, slots=True)
class ObjectStore:
    backend: Backend
    cache: SharedReads | None = field(default=None, kw_only=True)
    disk: Path | None = field(default=None, kw_only=True)
    """Folder of this host in which everything is; None: it is not known here."""
    traffic: Traffic = field(default_factory=Traffic, kw_only=True, compare=False)

    def bytes_on_disk(self) -> int | None:
        """Return what the store takes on its disk, with what is deleted and not yet swept."""
        if self.disk is None or not self.disk.is_dir():
            return None
        size = 0
        for path in self.disk.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # a sweep replaces files
                size += 512 * path.lstat().st_blocks
        return size

    async def put(self, folder: str, data: Content, *, suffix: str) -> ObjectRef:
        """Store ``data`` under ``folder``, named by its content."""
        if len(data) < CONCURRENT_HASH_BYTES:
            ref = await named(folder, data, suffix)
            with self.traffic.up.transfer(len(data)):
                await self.backend.write(ref.key, data)
            return ref
        naming = asyncio.create_task(named(folder, data, suffix))
        try:
            with self.traffic.up.transfer(len(data)):
                await self.backend.write_unnamed(checked_key(folder), data, naming)
            return await naming
        finally:
            naming.cancel()

    async def put_once(self, folder: str, data: bytes, *, suffix: str) -> ObjectRef:
        """Store what many workers have, like `put`, but only the first of them sends it."""
        ref = await named(folder, data, suffix)
        if await self.backend.size(ref.key) != ref.size:
            await self.backend.write(ref.key, data)
        return ref

    async def get(self, ref: ObjectRef) -> bytes:
        """Return the object that ``ref`` names.

        Raises:
            IntegrityError: if it is missing, or differs from the reference.
        """
        with self.traffic.down.transfer(ref.size):
            data = await self.backend.read(checked_key(ref.key))
            if data is None:
                raise IntegrityError(f"{ref.key} is not in the store")
        if len(data) != ref.size or await _sha256(data) != ref.sha256:
            raise IntegrityError(f"{ref.key} does not match its reference")
        return data

    async def get_shared(self, ref: ObjectRef) -> Data:
        """Return an object that many processes of this host read, through their cache, if there is
        one; raises as `get` does."""
        return await (self.get(ref) if self.cache is None else self.cache.get(ref, self))

    def stream(self, ref: ObjectRef, first: int = 0) -> AsyncGenerator[bytes]:
        """Yield the bytes of an object, from ``first`` on; nothing is verified but that there is
        one."""
        return self.traffic.down.counted(self.backend.stream(checked_key(ref.key), first))

    async def write(self, key: str, data: bytes) -> None:
        await self.backend.write(checked_key(key), data)

    async def create(self, key: str, data: bytes) -> bool:
        return await self.backend.create(checked_key(key), data)

    async def read(self, key: str) -> bytes | None:
        return await self.backend.read(checked_key(key))

    async def keys(self, folder: str) -> list[str]:
        """Return every key under ``folder``, sorted."""
        return sorted(await self.backend.keys(checked_key(folder) + "/"))

    async def folders(self) -> list[str]:
        """Return the names of the folders at the top of the store, sorted."""
        return sorted(name for name in await self.backend.folders() if _KEY.match(name))

    async def entries(self, folder: str) -> list[StoredObject]:
        """Return every object under ``folder``, sorted by its key."""
        return sorted(await self.backend.entries(checked_key(folder) + "/"))

    async def unfinished(self, folder: str) -> list[StoredObject]:
        """Return what writers that were killed have left under ``folder``, which is no object.
        Buckets do not report them; a lifecycle rule deletes them."""
        return await self.backend.unfinished(checked_key(folder) + "/")

    async def delete_unfinished(self, objects: Collection[StoredObject]) -> None:
        await self.backend.delete([each.key for each in objects])

    async def delete(self, keys: Collection[str]) -> None:
        """Delete ``keys``; a key that does not exist is no error."""
        await self.backend.delete([checked_key(key) for key in keys])

    async def delete_folder(self, folder: str) -> int:
        """Delete everything under ``folder``, and return the number of objects."""
        keys = await self.keys(folder)
        await self.backend.delete(keys)
        return len(keys)


async def named(folder: str, data: Content, suffix: str) -> ObjectRef:
    """Return the name that an object has by its content."""
    digest = await _sha256(data)
    key = checked_key(f"{folder}/{digest}{suffix}")
    return ObjectRef(key=key, sha256=digest, size=len(data))


async def _sha256(data: Content) -> str:
    """Hash the data, in a thread if they are large."""
    DIGESTED_BYTES.labels(of="object").inc(len(data))
    if len(data) < THREAD_HASH_BYTES:
        return hashlib.sha256(data).hexdigest()
    return (await asyncio.to_thread(hashlib.sha256, data)).hexdigest()


def open_store(settings: StoreSettings) -> ObjectStore:
    """Return the store at the URL of ``settings``; raise UserError for an unknown scheme."""
    parts = urlsplit(settings.url)
    if settings.url.startswith("file:///"):
        path = settings.url.removeprefix("file://")  # of a folder, # and ? begin nothing
        folder = Path(os.fsdecode(unquote_to_bytes(path)))
        return ObjectStore(FolderBackend(folder), disk=folder)
    if parts.scheme in BUCKETS and parts.netloc:
        from shared.store.bucket import BucketBackend  # loads obstore, which a folder does not need

        return ObjectStore(BucketBackend(settings), disk=settings.folder)
    schemes = ", ".join(f"{scheme}://bucket" for scheme in BUCKETS)
    raise UserError(f"store_url: {settings.url!r} is neither file:///folder nor one of {schemes}")


def checked_key(key: str) -> str:
    """Return ``key``; raise ContractError unless it consists of plain names, inside the store."""
    if len(key) > 512 or _KEY.match(key) is None:
        raise ContractError(f"{key!r} is not an object key")
    return key
