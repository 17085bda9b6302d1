"""The object store as emulated hosts see it.

A profile's `publish_seconds` go from an adapter in the trainer's memory to one that is verified in
a rollout worker's: half of them go by while it is stored, half while it is fetched, or as many more
as this machine needs for its bytes.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from shared.errors import IntegrityError
from shared.messages.contracts import ObjectRef
from shared.store import ObjectStore
from shared.store.objects import Content


@dataclass(frozen=True, slots=True)
class NodeStore(ObjectStore):
    """The store of one host: an adapter is fetched once, and its devices share the bytes."""

    folder: str = ""
    """Where the adapters are."""
    seconds: float = 0.0
    """Seconds that a fetch takes, scaled."""
    _fetched: "dict[str, asyncio.Task[bytes]]" = field(default_factory=dict)
    """The newest adapter, by its key."""

    async def get(self, ref: ObjectRef) -> bytes:
        if not ref.key.startswith(f"{self.folder}/"):
            return await ObjectStore.get(self, ref)
        if ref.key not in self._fetched:
            self._fetched.clear()
            self._fetched[ref.key] = asyncio.create_task(self._fetch(ref))
        return await asyncio.shield(self._fetched[ref.key])

    async def _fetch(self, ref: ObjectRef) -> bytes:
        """Checks on a thread: other hosts' devices are in this process as well."""
        async with at_least(self.seconds):
            data = await self.backend.read(ref.key)
            if data is None or await asyncio.to_thread(_digest, data) != ref.sha256:
                raise IntegrityError(f"{ref.key} is not what its reference says")
        return data


@dataclass(frozen=True, slots=True)
class PublishingStore(ObjectStore):
    """The store as the trainer sees it."""

    folder: str = ""
    """Where the adapters are."""
    seconds: float = 0.0
    """Seconds that storing an adapter takes, scaled."""

    async def put(self, folder: str, data: Content, *, suffix: str) -> ObjectRef:
        async with at_least(self.seconds if folder == self.folder else 0.0):
            return await ObjectStore.put(self, folder, data, suffix=suffix)


@contextlib.asynccontextmanager
async def at_least(seconds: float) -> AsyncIterator[None]:
    """Goes on after so many seconds at the earliest."""
    began = time.monotonic()
    yield
    await asyncio.sleep(max(0.0, seconds - (time.monotonic() - began)))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
