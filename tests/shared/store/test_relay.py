"""Hosts pass on what they receive, and one that gives nothing, or something else, does no harm."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from digenrl.local.processes.ports import free_ports
from shared.errors import UserError
from shared.messages.contracts import ObjectRef
from shared.store import ObjectStore
from shared.store.backend import CHUNK
from shared.store.cache_folder import CacheFolder
from shared.store.host_cache import HostCache
from shared.store.peers import peer_list
from shared.store.relay import Peer, PeerFailed, Relay
from shared.telemetry import SHARED_BYTES
from tests.shared.store.hosts import LIMIT, Counting, Listed, counted
from tests.waiting import until

SIZE = 4 * CHUNK + 5
WAIT_S = 20.0


@pytest.fixture
def backend(tmp_path: Path) -> Counting:
    return Counting(tmp_path / "objects")


@contextlib.asynccontextmanager
async def hosts(number: int, folder: Path, backend: Counting) -> AsyncIterator[list[ObjectStore]]:
    """The store as each of so many hosts sees it."""
    listed, stores = Listed(), []
    async with contextlib.AsyncExitStack() as stack:
        for each in range(number):
            cache = CacheFolder.open(folder / f"host-{each}")
            relay = Relay(cache, ("127.0.0.1", free_ports(1)[0]), listed)
            await stack.enter_async_context(relay)
            stores.append(ObjectStore(backend, cache=HostCache(cache, LIMIT, relay)))
        yield stores


def cache_of(store: ObjectStore) -> HostCache:
    assert isinstance(store.cache, HostCache)
    return store.cache


def received(store: ObjectStore) -> int:
    """Bytes of parts that a host has so far."""
    return sum(path.stat().st_size for path in cache_of(store).folder.root.glob("*.part"))


async def stored(backend: Counting) -> ObjectRef:
    data = bytes(range(256)) * (SIZE // 256) + bytes(SIZE % 256)
    return await ObjectStore(backend).put("run/weights", data, suffix=".safetensors")


async def test_the_store_sends_once_and_every_host_passes_on_while_it_receives(
    backend: Counting, tmp_path: Path
) -> None:
    ref = await stored(backend)
    backend.pauses_at = 2
    backend.goes_on.clear()
    async with hosts(4, tmp_path, backend) as stores, asyncio.timeout(WAIT_S):
        reading = [asyncio.create_task(store.get_shared(ref)) for store in stores]
        await until(lambda: received(stores[-1]) >= 2 * CHUNK)
        assert not any(task.done() for task in reading)
        with counted(SHARED_BYTES, source="store") as from_store:
            backend.goes_on.set()
            found = await asyncio.gather(*reading)
    data = await backend.read(ref.key)
    assert all(each[:] == data for each in found)
    assert backend.read_bytes == 2 * SIZE  # one of them by this test
    assert from_store.value == SIZE - 2 * CHUNK


async def test_a_host_that_has_gone_is_passed_over_and_what_is_received_is_not_read_again(
    backend: Counting, tmp_path: Path
) -> None:
    ref = await stored(backend)
    backend.pauses_at = 2
    backend.goes_on.clear()
    async with hosts(3, tmp_path, backend) as stores, asyncio.timeout(WAIT_S):
        reading = []
        for store in stores:
            reading.append(asyncio.create_task(store.get_shared(ref)))
            while received(store) < 2 * CHUNK:  # noqa: ASYNC110 -- of files
                await asyncio.sleep(0.01)
        reading[0].cancel()  # the one that reads from the store
        backend.goes_on.set()
        found = await asyncio.gather(*reading[1:])
    assert backend.read_bytes == SIZE
    assert found[0][:] == found[1][:] == await backend.read(ref.key)


async def test_a_host_that_gives_something_else_does_no_harm(
    backend: Counting, tmp_path: Path
) -> None:
    ref = await stored(backend)
    async with hosts(3, tmp_path, backend) as stores, asyncio.timeout(WAIT_S):
        await stores[0].get_shared(ref)
        lying = cache_of(stores[0]).folder.root / ref.sha256
        lying.chmod(0o600)
        lying.write_bytes(bytes(SIZE))
        lying.chmod(0o400)
        found = await stores[1].get_shared(ref)
        assert found[:] == await backend.read(ref.key)
        before = backend.read_bytes
        assert (await stores[2].get_shared(ref))[:] == found[:]
        assert backend.read_bytes == before  # from the second, which is right


async def test_whoever_does_not_know_the_word_is_given_nothing(
    backend: Counting, tmp_path: Path
) -> None:
    ref = await stored(backend)
    async with hosts(1, tmp_path, backend) as [store], asyncio.timeout(WAIT_S):
        await store.get_shared(ref)
        cache = cache_of(store)
        assert cache.relay is not None
        host, port = cache.relay.at
        word = cache.folder.secret()
        known = Peer(host=host, port=port, token=word, attempt="0" * 16)
        async with contextlib.aclosing(known.chunks(ref, SIZE - 5)) as chunks:
            assert [chunk async for chunk in chunks] == [bytes(5)]
        for peer, wanted in (
            (known.model_copy(update={"token": "0" * 32}), ref),
            (known, ref.model_copy(update={"sha256": "0" * 64})),
            (known, ref.model_copy(update={"size": SIZE + 1})),
        ):
            with pytest.raises(PeerFailed):
                async with contextlib.aclosing(peer.chunks(wanted, 0)) as chunks:
                    await anext(chunks)
        for question in (b"GET / HTTP/1.1\r\n", b"{}\n", b"x" * 5000, b"\n"):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(question)
            assert await reader.read() in (b"no\n", b"")
            writer.close()


async def test_one_process_answers_for_its_host_and_another_one_after_it(
    backend: Counting, tmp_path: Path
) -> None:
    ref, listed = await stored(backend), Listed()
    folder, at = CacheFolder.open(tmp_path / "host"), ("127.0.0.1", free_ports(1)[0])
    one, other = Relay(folder, at, listed), Relay(folder, at, listed)

    async def answers() -> bool:
        try:
            reader, writer = await asyncio.open_connection(*at)
        except ConnectionError:
            return False
        writer.write(b"\n")
        with contextlib.closing(writer):
            return await reader.read() == b"no\n"

    await one.__aenter__()
    async with other, asyncio.timeout(WAIT_S):
        assert await one.join(ref, "0" * 16) == [] and await answers()
        await one.__aexit__()
        assert not await answers()
        assert await other.join(ref, "1" * 16) == []  # its host is none of the others
        assert await answers()
    with pytest.raises(UserError, match="share_at"):
        async with Relay(folder, ("192.0.2.1", at[1]), listed):
            pass


async def test_hosts_find_those_before_them_in_redis(redis_url: str) -> None:
    def peer(number: int) -> Peer:
        return Peer(host=f"10.0.0.{number}", port=7800, token="0" * 32, attempt="0" * 16)

    async with peer_list(redis_url, "test") as peers:
        assert await peers.enter("a" * 64, peer(1)) == []
        assert await peers.enter("a" * 64, peer(2)) == [peer(1)]
        await peers._redis.rpush(f"dg:peers:test:{'a' * 64}", "no peer")
        assert await peers.enter("a" * 64, peer(3)) == [peer(2), peer(1)]
        assert await peers.enter("b" * 64, peer(3)) == []


async def test_without_redis_objects_come_from_the_store() -> None:
    async with peer_list(f"redis://127.0.0.1:{free_ports(1)[0]}", "test") as peers:
        me = Peer(host="10.0.0.1", port=7800, token="0" * 32, attempt="0" * 16)
        assert await peers.enter("a" * 64, me) == []
