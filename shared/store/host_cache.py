"""Objects that many processes of a host read: one process fetches each object, the others map its
file.

    present object       is mapped: no bytes are read, copied or digested
    missing object        is fetched by the process with the object's lock; the others wait for
        it

The bytes come from the store, or from a host that is receiving them (`relay`). Either way their
digest is taken once, here, while they are received. A cache that cannot be used, for example on a
full disk, does not stop the process: the object is then read without it.
"""

import asyncio
import hashlib
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import structlog

from shared.errors import IntegrityError, UserError
from shared.limits import LOCK_POLL_S, MAX_FETCHES, MIN_WAITS_PER_POLL
from shared.messages.contracts import ObjectRef
from shared.store.cache_folder import CacheFolder, ReceivedObject
from shared.store.objects import ObjectStore
from shared.store.relay import PeerFailed, Relay
from shared.store.settings import CacheSettings
from shared.store.tensor_header import Data
from shared.telemetry import DIGESTED_BYTES, SHARED_BYTES

log = structlog.get_logger()


class FetchSource(NamedTuple):
    name: str
    chunks: Callable[[int], AsyncGenerator[bytes]]
    """Yields an object's bytes from an offset on."""


@dataclass(slots=True)
class Fetch:
    task: "asyncio.Task[None]"
    waiting: int = 0
    """Readers of this process who wait for it."""


@dataclass(frozen=True, slots=True)
class HostCache:
    """Implements `SharedReads`."""

    folder: CacheFolder
    limit: int
    """Most bytes in the folder."""
    relay: Relay | None = None
    _under_way: dict[tuple[str, int], Fetch] = field(default_factory=dict)

    async def get(self, ref: ObjectRef, store: ObjectStore) -> Data:
        """Return the object that ``ref`` names.

        Raises:
            IntegrityError: if it is missing, or differs from the reference.
        """
        try:
            for _ in range(MAX_FETCHES):
                if (data := self.folder.map(ref.sha256, ref.size)) is not None:
                    SHARED_BYTES.labels(source="cache").inc(ref.size)
                    return data
                await self._until_here(ref, store)
            raise OSError(
                f"{ref.key} was removed {MAX_FETCHES} times: make room for all that is in use"
            )
        except OSError as error:
            log.warning(
                "host_cache_unusable",
                folder=str(self.folder.root),
                error=str(error),
                hint="read from the store by each process; DIGENRL_HOST_CACHE names another folder",
            )
            SHARED_BYTES.labels(source="store").inc(ref.size)
            return await store.get(ref)

    async def offer(self, ref: ObjectRef, data: bytes) -> None:
        """Give an object to other processes and hosts that is in no store.

        Raises:
            IntegrityError: if the folder cannot hold it.
        """
        try:
            async with self._locked(ref.sha256):
                self.folder.make_room(ref.sha256, ref.size, self.limit)
                with self._receiving(ref) as (attempt, part):
                    await asyncio.to_thread(part.add, data)
                    self.folder.keep(part, ref.sha256)
                    if self.relay is not None:
                        await self.relay.join(ref, attempt, None)
        except OSError as error:
            raise IntegrityError(f"{ref.key}: {error}") from error

    async def stop(self) -> None:
        """End what is under way."""
        tasks = [fetch.task for fetch in self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_here(self, ref: ObjectRef, store: ObjectStore) -> None:
        """Wait for a fetch that all readers of this process share; it ends with the last of
        them."""
        name = (ref.sha256, ref.size)
        fetch = self._under_way.get(name)
        if fetch is None:
            fetch = self._under_way[name] = Fetch(asyncio.create_task(self._fetch(ref, store)))
        fetch.waiting += 1
        try:
            await asyncio.shield(fetch.task)
        finally:
            fetch.waiting -= 1
            if not fetch.waiting or fetch.task.done():
                fetch.task.cancel()
                if self._under_way.get(name) is fetch:
                    del self._under_way[name]

    async def _fetch(self, ref: ObjectRef, store: ObjectStore) -> None:
        async with self._locked(ref.sha256):
            if self.folder.map(ref.sha256, ref.size) is not None:  # another process was faster
                return
            if ref.size > self.limit:
                raise OSError(f"{ref.size} bytes are more than DIGENRL_HOST_CACHE_GIB allows")
            self.folder.make_room(ref.sha256, ref.size, self.limit)
            await self._fill(ref, store)

    async def _fill(self, ref: ObjectRef, store: ObjectStore) -> None:
        """Receive it from other hosts, as far as they have it, and the rest from the store; if that
        makes up something else, all of it from the store."""
        with self._receiving(ref) as (attempt, part):
            # The part is there already: once this host is listed, others ask for it.
            sources = await self._sources(ref, attempt, store)
            try:
                return await self._receive(ref, part, sources)
            except IntegrityError as error:
                if len(sources) == 1:
                    raise
                log.warning("peer_wrong", error=str(error), hint="read from the store instead")
        with self._receiving(ref) as (_, part):
            await self._receive(ref, part, sources[-1:])

    async def _sources(self, ref: ObjectRef, attempt: str, store: ObjectStore) -> list[FetchSource]:
        """Return the other hosts that this one may read from, and the store."""
        relay = self.relay
        if relay is None:
            return [FetchSource("store", partial(store.stream, ref))]

        async def measured(first: int) -> AsyncGenerator[bytes]:
            async with aclosing(relay.store_reads.counted(store.stream(ref, first))) as chunks:
                async for chunk in chunks:
                    yield chunk
            await relay.store_rates()

        peers = await relay.join(ref, attempt, store.traffic.up.rate)
        read = (partial(peer.chunks, ref, min_rate=relay.min_rate) for peer in peers)
        return [*(FetchSource("peer", each) for each in read), FetchSource("store", measured)]

    @contextmanager
    def _receiving(self, ref: ObjectRef) -> Iterator[tuple[str, ReceivedObject]]:
        attempt = secrets.token_hex(8)
        with self.folder.receiving(ref.sha256, attempt) as part:
            yield attempt, part

    async def _receive(
        self, ref: ObjectRef, part: ReceivedObject, sources: list[FetchSource]
    ) -> None:
        """Write what the sources give, each from where the one before has ended, and give it its
        name.

        Raises:
            IntegrityError: if it does not match ``ref``.
        """
        digest = hashlib.sha256()
        for source in sources:
            try:
                async with aclosing(source.chunks(part.size)) as chunks:
                    async for chunk in chunks:
                        SHARED_BYTES.labels(source=source.name).inc(len(chunk))
                        if part.size + len(chunk) > ref.size:
                            raise IntegrityError(f"{ref.key} is larger than in its reference")
                        await asyncio.to_thread(_add, part, chunk, digest.update)
                break
            except PeerFailed as error:
                log.info("peer_failed", error=str(error), received=part.size, size=ref.size)
        if part.size != ref.size or digest.hexdigest() != ref.sha256:
            raise IntegrityError(f"{ref.key} does not match its reference")
        self.folder.keep(part, ref.sha256)

    @asynccontextmanager
    async def _locked(self, digest: str) -> AsyncIterator[None]:
        began = time.monotonic()
        while (descriptor := self.folder.lock(digest)) is None:  # noqa: ASYNC110 -- of a process
            await asyncio.sleep(max(LOCK_POLL_S, (time.monotonic() - began) / MIN_WAITS_PER_POLL))
        try:
            yield
        finally:
            os.close(descriptor)


def _add(part: ReceivedObject, chunk: bytes, digest: Callable[[bytes], None]) -> None:
    part.add(chunk)
    digest(chunk)
    DIGESTED_BYTES.labels(of="object").inc(len(chunk))


@asynccontextmanager
async def host_cache(
    settings: CacheSettings | None, *, redis_url: str, run: str, ca: str | None = None
) -> AsyncIterator[HostCache | None]:
    """Open this host's cache; None if it is off, or if the default one cannot be used.

    Raises:
        UserError: if the configured folder cannot be used.
    """
    folder = None if settings is None else _opened(settings)
    if settings is None or folder is None:
        yield None
        return
    async with AsyncExitStack() as stack:
        stack.callback(folder.close)
        relay = None
        if settings.share_at is not None:
            from shared.store.peers import peer_list  # Redis' client

            peers = await stack.enter_async_context(peer_list(redis_url, run, ca))
            relay = await stack.enter_async_context(
                Relay(folder, settings.share_at, peers, settings.site)
            )
        cache = HostCache(folder, settings.limit, relay)
        stack.push_async_callback(cache.stop)
        yield cache


def _opened(settings: CacheSettings) -> CacheFolder | None:
    try:
        return CacheFolder.open(settings.folder)
    except OSError as error:
        refusal = f"host_cache: {settings.folder} cannot be used: {error}"
        if settings.is_chosen:
            raise UserError(refusal) from error
    except UserError as error:
        refusal = str(error)
        if settings.is_chosen:
            raise
    log.warning("host_cache_off", reason=refusal)
    return None
