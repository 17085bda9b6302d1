"""Hosts pass on what they receive, and one that gives nothing, or something else, does no harm."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from digenrl.local.processes.ports import free_ports
from shared.errors import UserError
from shared.messages.contracts import ObjectRef
from shared.messages.records import HOME
from shared.store import ObjectStore
from shared.store.backend import CHUNK
from shared.store.cache_folder import CacheFolder
from shared.store.host_cache import HostCache
from shared.store.peers import peer_list
from shared.store.relay import Peer, PeerFailed, Relay, StoreRates
from shared.telemetry import SHARED_BYTES, TRANSFERRED_BYTES
from tests.shared.store.hosts import LIMIT, Counting, Listed, counted
from tests.waiting import until

SIZE = 4 * CHUNK + 5
WAIT_S = 20.0


@pytest.fixture
def backend(tmp_path: Path) -> Counting:
    return Counting(tmp_path / "objects")


@contextlib.asynccontextmanager
async def hosts(
    number: int, folder: Path, backend: Counting, *, listed: Listed | None = None,
    sites: Sequence[str] = (HOME,),
) -> AsyncIterator[list[ObjectStore]]:  # fmt: skip
    """The store as each of so many hosts, in turn of these sites, sees it."""
    listed, stores = listed or Listed(), []
    async with contextlib.AsyncExitStack() as stack:
        for each in range(number):
            cache = CacheFolder.open(folder / f"host-{each}")
            at, site = ("127.0.0.1", free_ports(1)[0]), sites[each % len(sites)]
            relay = Relay(cache, at, listed, site)
            await stack.enter_async_context(relay)
            stores.append(ObjectStore(backend, cache=HostCache(cache, LIMIT, relay)))
        yield stores


def cache_of(store: ObjectStore) -> HostCache:
    assert isinstance(store.cache, HostCache)
    return store.cache


def entry(host: str, port: int = 7800, token: str = "0" * 32, site: str = HOME,
          receives: float | None = None, sends: float | None = None) -> Peer:  # fmt: skip
    return Peer(
        host=host, port=port, token=token, attempt="0" * 16, site=site,
        receives=receives, sends=sends,
    )  # fmt: skip


async def no_rate() -> float:
    return 0.0


@contextlib.asynccontextmanager
async def slow_host(data: bytes, bytes_per_s: float, site: str = HOME) -> AsyncIterator[Peer]:
    """A host that gives these bytes, slowly, and claims that its line is fast."""

    async def give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at = json.loads(await reader.readline())["first"]
        writer.write(b"ok\n")
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while at < len(data):
                await asyncio.sleep(0.05)
                step = int(0.05 * bytes_per_s)
                writer.write(data[at : at + step])
                await writer.drain()
                at += step

    server = await asyncio.start_server(give, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        yield entry(host, port, site=site, receives=1e12, sends=1e12)


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


@pytest.mark.parametrize("site", [HOME, "far"])
async def test_a_source_slower_than_half_of_the_store_costs_a_second_and_what_it_gave_is_kept(
    backend: Counting, tmp_path: Path, site: str
) -> None:
    ref, listed = await stored(backend), Listed()
    data = await backend.read(ref.key)
    assert data is not None
    listed.rates[HOME] = {"another host": 8e6}
    async with (
        hosts(1, tmp_path, backend, listed=listed) as [store],
        slow_host(data, 1e6, site) as slow,
        asyncio.timeout(WAIT_S),
    ):
        listed.entered[ref.sha256] = [slow]
        began = time.monotonic()
        with counted(SHARED_BYTES, source="peer") as given:
            found = await store.get_shared(ref)
        seconds = time.monotonic() - began
    assert found[:] == data
    assert backend.read_bytes == SIZE + SIZE - given.value  # the first by this test
    assert 0.5e6 < given.value < 3e6 and 1 < seconds < 4


async def test_a_slow_source_is_kept_where_the_store_is_as_slow(
    backend: Counting, tmp_path: Path
) -> None:
    ref, listed = await stored(backend), Listed()
    data = await backend.read(ref.key)
    assert data is not None
    listed.rates["far"] = {"another host": 2.5e6}
    async with (
        hosts(1, tmp_path, backend, listed=listed, sites=["far"]) as [store],
        slow_host(data, 2e6, "far") as slow,
        asyncio.timeout(WAIT_S),
    ):
        listed.entered[ref.sha256] = [slow]
        found = await store.get_shared(ref)
    assert found[:] == data and backend.read_bytes == SIZE


async def test_a_slow_source_of_wrong_bytes_does_no_harm(backend: Counting, tmp_path: Path) -> None:
    ref, listed = await stored(backend), Listed()
    listed.rates[HOME] = {"another host": 8e6}
    async with (
        hosts(1, tmp_path, backend, listed=listed) as [store],
        slow_host(bytes(SIZE), 1e6) as slow,
        asyncio.timeout(WAIT_S),
    ):
        listed.entered[ref.sha256] = [slow]
        found = await store.get_shared(ref)
    assert found[:] == await backend.read(ref.key)


async def test_one_host_of_each_site_reads_from_the_store(
    backend: Counting, tmp_path: Path
) -> None:
    ref = await stored(backend)
    async with hosts(8, tmp_path, backend, sites=[HOME, "far"]) as stores, asyncio.timeout(WAIT_S):
        with counted(TRANSFERRED_BYTES, direction="down") as down:
            found = await asyncio.gather(*(store.get_shared(ref) for store in stores))
    assert len({each[:] for each in found}) == 1
    assert SIZE < down.value <= backend.read_bytes == 2 * SIZE


def test_a_host_serves_another_site_only_over_a_line_at_least_as_fast_as_the_store() -> None:
    fast, slow = entry("a", receives=5e6, sends=5e6), entry("b", receives=5e6, sends=1e6)
    assert fast.is_source("far", 5e6) and not fast.is_source("far", 6e6)
    assert not slow.is_source("far", 5e6) and slow.is_source("far", 1e6)
    for unmeasured in (entry("c"), entry("c", receives=5e6), entry("c", sends=5e6)):
        assert not unmeasured.is_source("far", 1e3) and unmeasured.is_source(HOME, 5e6)
    assert not fast.is_source("far", None) and fast.is_source(HOME, None)
    assert slow.is_source(HOME, 5e6) and not slow.is_source(HOME, 50e6)


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
        known = entry(host, port, word)
        async with contextlib.aclosing(known.chunks(ref, SIZE - 5, no_rate)) as chunks:
            assert [chunk async for chunk in chunks] == [bytes(5)]
        for peer, wanted in (
            (known.model_copy(update={"token": "0" * 32}), ref),
            (known, ref.model_copy(update={"sha256": "0" * 64})),
            (known, ref.model_copy(update={"size": SIZE + 1})),
        ):
            with pytest.raises(PeerFailed):
                async with contextlib.aclosing(peer.chunks(wanted, 0, no_rate)) as chunks:
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
        assert await one.join(ref, "0" * 16, None) == [] and await answers()
        await one.__aexit__()
        assert not await answers()
        assert await other.join(ref, "1" * 16, None) == []  # its host is none of the others
        assert await answers()
    with pytest.raises(UserError, match="share_at"):
        async with Relay(folder, ("192.0.2.1", at[1]), listed):
            pass


async def test_hosts_find_those_before_them_in_redis(redis_url: str) -> None:
    def peer(number: int) -> Peer:
        return entry(f"10.0.0.{number}")

    async with peer_list(redis_url, "test") as peers:
        assert await peers.enter("a" * 64, peer(1)) == []
        assert await peers.enter("a" * 64, peer(2)) == [peer(1)]
        await peers._redis.rpush(f"dg:peers:test:{'a' * 64}", "no peer")
        assert await peers.enter("a" * 64, peer(3)) == [peer(2), peer(1)]
        assert await peers.enter("b" * 64, peer(3)) == []
        good = peer(4).model_dump(mode="json")
        for bad in (
            {"site": "two words"}, {"receives": 0.0}, {"sends": -1.0}, {"sends": float("nan")},
            {"receives": float("inf")},
        ):  # fmt: skip
            await peers._redis.rpush(f"dg:peers:test:{'b' * 64}", json.dumps({**good, **bad}))
        assert await peers.enter("b" * 64, peer(5)) == [peer(3)]


async def test_hosts_of_a_site_find_how_fast_one_of_them_reads_from_the_store(
    redis_url: str,
) -> None:
    async with peer_list(redis_url, "test") as peers:
        assert await peers.store_rates("far", "a:1", None) == StoreRates(None, None)
        assert await peers.store_rates("far", "a:1", 5.0) == StoreRates(5.0, 5.0)
        assert await peers.store_rates("far", "b:1", 9.0) == StoreRates(9.0, 9.0)
        assert await peers.store_rates("far", "a:1", None) == StoreRates(5.0, 9.0)
        assert await peers.store_rates("far", "c:1", None) == StoreRates(None, 9.0)
        assert await peers.store_rates(HOME, "c:1", None) == StoreRates(None, None)


async def test_a_lying_rate_in_redis_is_no_rate(redis_url: str) -> None:
    async with peer_list(redis_url, "test") as peers:
        await peers._redis.zadd("dg:peers:test:site:far", {"a:1": -1.0, "b:1": float("inf")})
        assert await peers.store_rates("far", "a:1", None) == StoreRates(None, None)
        assert await peers.store_rates("far", "c:1", 5.0) == StoreRates(5.0, 5.0)


async def test_without_redis_objects_come_from_the_store() -> None:
    async with peer_list(f"redis://127.0.0.1:{free_ports(1)[0]}", "test") as peers:
        assert await peers.enter("a" * 64, entry("10.0.0.1")) == []
        assert await peers.store_rates("home", "10.0.0.1:7800", 5.0) == StoreRates(5.0, None)
