"""Hosts that read objects, each with a cache in a folder of its own, all on this machine."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import Counter

from shared.store.cache_folder import CacheFolder
from shared.store.folder import FolderBackend
from shared.store.host_cache import HostCache
from shared.store.relay import Peer, Relay, StoreRates

LIMIT = 1 << 30


class Counting(FolderBackend):
    """Counts the bytes that are read, and may be told to stop in the middle of an object."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read_bytes = 0
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.pauses_at = 1
        """Chunk before which it stops while it does not go on."""

    async def read(self, key: str) -> bytes | None:
        data = await super().read(key)
        self.read_bytes += len(data or b"")
        return data

    async def stream(self, key: str, first: int) -> AsyncGenerator[bytes]:
        number = 0
        async for chunk in super().stream(key, first):
            if number == self.pauses_at:
                await self.goes_on.wait()
            number += 1
            self.read_bytes += len(chunk)
            yield chunk


class CountedReads(FolderBackend):
    """A folder that counts what is read of it."""

    num_reads = 0

    async def read(self, key: str) -> bytes | None:
        self.num_reads += 1
        return await super().read(key)


def process_on(host: Path, relay: Relay | None = None, limit: int = LIMIT) -> HostCache:
    """The cache as one process of the host in this folder uses it."""
    return HostCache(CacheFolder.open(host), limit, relay)


@dataclass
class Listed:
    """Implements `PeerList` for hosts of one test."""

    entered: dict[str, list[Peer]] = field(default_factory=dict)
    rates: dict[str, dict[str, float]] = field(default_factory=dict)

    async def enter(self, sha256: str, me: Peer) -> list[Peer]:
        before = self.entered.setdefault(sha256, [])
        before.append(me)
        return before[-2::-1]

    async def store_rates(self, site: str, host: str, measured: float | None) -> StoreRates:
        rates = self.rates.setdefault(site, {})
        if measured is not None:
            rates[host] = measured
        return StoreRates(rates.get(host), max(rates.values(), default=None))


@dataclass
class Count:
    value: float = 0.0


@contextmanager
def counted(counter: Counter, **labels: str) -> Iterator[Count]:
    """What is added to a counter meanwhile."""
    of_labels = counter.labels(**labels)
    before, count = of_labels._value.get(), Count()
    yield count
    count.value = of_labels._value.get() - before
