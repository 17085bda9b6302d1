"""The object store as emulated hosts see it.

A profile's `publish_seconds` go from an adapter in the trainer's memory to one that is verified in
a rollout worker's: half of them go by while it is stored, half while it is fetched, or as many more
as this machine needs for its bytes.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field

from shared.messages.contracts import ObjectRef
from shared.store import ObjectStore
from shared.store.backend import Content


@dataclass(slots=True)
class Line:
    """What bytes take on their way to a store, or from it: one object after the other."""

    seconds: float = 0.0
    """Seconds that a byte takes, on the emulation's clock."""
    _free_at: float = 0.0

    @contextlib.asynccontextmanager
    async def carries(self, size: int) -> AsyncIterator[None]:
        """Goes on when so many bytes are over, at the earliest."""
        self._free_at = max(self._free_at, time.monotonic()) + size * self.seconds
        over = self._free_at
        yield
        await asyncio.sleep(max(0.0, over - time.monotonic()))


@dataclass(frozen=True, slots=True)
class NodeStore(ObjectStore):
    """The store as a host sees it, whose cache (`shared.store.host_cache`) fetches an adapter once
    for all its devices."""

    folder: str = ""
    """Where the adapters are."""
    line: Line = field(default_factory=Line)

    async def stream(self, ref: ObjectRef, first: int = 0) -> AsyncGenerator[bytes]:
        is_adapter = ref.key.startswith(f"{self.folder}/")
        async with (
            self.line.carries(ref.size if is_adapter else 0),
            contextlib.aclosing(ObjectStore.stream(self, ref, first)) as chunks,
        ):
            async for chunk in chunks:
                yield chunk


@dataclass(frozen=True, slots=True)
class PublishingStore(ObjectStore):
    """The store as whoever trains sees it."""

    lines: Mapping[str, Line] = field(default_factory=dict)
    """Folder -> the line to it."""

    async def put(self, folder: str, data: Content, *, suffix: str) -> ObjectRef:
        async with self.lines.get(folder, Line()).carries(len(data)):
            return await ObjectStore.put(self, folder, data, suffix=suffix)


@contextlib.asynccontextmanager
async def at_least(seconds: float) -> AsyncIterator[None]:
    """Goes on after so many seconds at the earliest."""
    began = time.monotonic()
    yield
    await asyncio.sleep(max(0.0, seconds - (time.monotonic() - began)))
