"""Interface between a store of objects and its location: a folder or a bucket."""

from collections.abc import AsyncGenerator, Awaitable
from typing import NamedTuple, Protocol

from shared.messages.contracts import ObjectRef

Content = bytes | memoryview
"""Bytes to store: the memory of a view must not change during the call."""
CHUNK = 1 << 20
"""Bytes of an object that are read at a time where it is read in parts."""
PIECE = 1 << 16
"""Bytes that are read at a time over a slow line, so that others can have them soon."""


class StoredObject(NamedTuple):
    key: str
    size: int
    modified: float
    """Unix seconds of its last write, by the store's clock."""


class Backend(Protocol):
    async def write(self, key: str, data: Content) -> None:
        """Store durably and atomically: a reader sees the whole object or none."""

    async def write_unnamed(self, folder: str, data: Content, ref: Awaitable[ObjectRef]) -> None:
        """Store like `write`, under the key of ``ref``, which is in ``folder`` and becomes known
        meanwhile."""

    async def create(self, key: str, data: bytes) -> bool:
        """Store like `write`; return False and change nothing if the key exists."""

    async def read(self, key: str) -> bytes | None: ...

    def stream(self, key: str, first: int) -> AsyncGenerator[bytes]:
        """Yield the object's bytes from ``first`` on, some MiB at most at a time; raise
        IntegrityError if there is no such object."""

    async def size(self, key: str) -> int | None:
        """Return the bytes of the object, None if it does not exist."""

    async def keys(self, prefix: str) -> list[str]: ...
    async def entries(self, prefix: str) -> list[StoredObject]: ...
    async def folders(self) -> list[str]: ...

    async def unfinished(self, prefix: str) -> list[StoredObject]:
        """Return what writers have left that were killed: it is no object, and takes space."""

    async def delete(self, keys: list[str]) -> None: ...
