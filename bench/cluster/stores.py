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
from shared.store.objects import Content


@dataclass(frozen=True, slots=True)
class NodeStore(ObjectStore):
    """The store as a host sees it, whose cache (`shared.store.host_cache`) fetches an adapter once
    for all its devices."""

    folder: str = ""
    """Where the adapters are."""
    seconds: float = 0.0
    """Seconds that a fetch takes, scaled."""

    async def stream(self, ref: ObjectRef, first: int = 0) -> AsyncGenerator[bytes]:
        is_adapter = ref.key.startswith(f"{self.folder}/")
        async with (
            at_least(self.seconds if is_adapter else 0.0),
            contextlib.aclosing(ObjectStore.stream(self, ref, first)) as chunks,
        ):
            async for chunk in chunks:
                yield chunk


@dataclass(frozen=True, slots=True)
class PublishingStore(ObjectStore):
    """The store as whoever trains sees it."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """Folder -> seconds that storing something in it takes, scaled."""

    async def put(self, folder: str, data: Content, *, suffix: str) -> ObjectRef:
        async with at_least(self.seconds.get(folder, 0.0)):
            return await ObjectStore.put(self, folder, data, suffix=suffix)


@contextlib.asynccontextmanager
async def at_least(seconds: float) -> AsyncIterator[None]:
    """Goes on after so many seconds at the earliest."""
    began = time.monotonic()
    yield
    await asyncio.sleep(max(0.0, seconds - (time.monotonic() - began)))
