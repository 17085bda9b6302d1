"""The object store as emulated hosts see it."""

import asyncio
import hashlib
import time
from dataclasses import dataclass, field

from shared.contracts import ObjectRef
from shared.errors import IntegrityError
from shared.store import ObjectStore


@dataclass(frozen=True, slots=True)
class NodeStore(ObjectStore):
    """Of one host: an adapter is fetched once, and its devices share the bytes."""

    folder: str = ""
    """Of the adapters."""
    _fetched: "dict[str, asyncio.Task[bytes]]" = field(default_factory=dict)
    """The newest."""

    async def get(self, ref: ObjectRef) -> bytes:
        if not ref.key.startswith(f"{self.folder}/"):
            return await ObjectStore.get(self, ref)
        if ref.key not in self._fetched:
            self._fetched.clear()
            self._fetched[ref.key] = asyncio.create_task(self._fetch(ref))
        return await asyncio.shield(self._fetched[ref.key])

    async def _fetch(self, ref: ObjectRef) -> bytes:
        """Checked on a thread: other hosts' devices are in this process as well."""
        data = await self.backend.read(ref.key)
        if data is None or await asyncio.to_thread(_digest, data) != ref.sha256:
            raise IntegrityError(f"{ref.key} is not what its reference says")
        return data


@dataclass(frozen=True, slots=True)
class PublishingStore(ObjectStore):
    """The trainer's: storing an adapter takes what its publication takes, or as long as it really
    does."""

    folder: str = ""
    """Of the adapters."""
    seconds: float = 0.0
    """Scaled."""

    async def put(self, folder: str, data: bytes, *, suffix: str) -> ObjectRef:
        began = time.monotonic()
        ref = await ObjectStore.put(self, folder, data, suffix=suffix)
        if folder == self.folder:
            await asyncio.sleep(max(0.0, self.seconds - (time.monotonic() - began)))
        return ref


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
