"""What clients of a world's store and Redis see of each fault."""

import asyncio
import contextlib
from collections.abc import Iterator
from math import inf
from random import Random

import pytest
import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError

from shared.errors import IntegrityError, Unavailable
from shared.run.log import Log
from shared.store import ObjectStore
from tests.run_log import letter
from tests.world import bucket, valkey
from tests.world.bucket import Bucket, BucketHandle
from tests.world.valkey import Valkey

LAG_S = 0.04
KEY = "digits/commits/1"
INDEXED = "dg:wv:digits:1"


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "RETRIES_S", 0.3)
    monkeypatch.setattr(bucket, "PAUSE_S", 0.05)
    monkeypatch.setattr(bucket, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(valkey, "AGAIN_S", 0.02)


@pytest.fixture
def handle() -> BucketHandle:
    handle = Bucket(("digits",), Random(0)).handle("trainer-0", "trainer")
    handle.delay = lambda operation, size: LAG_S
    return handle


@pytest.mark.parametrize("fault", ["is_down", "is_full", "is_hanging", "requests", "answers"])
async def test_a_fault_that_ends_in_time_is_a_delay_and_one_that_does_not_is_said(
    handle: BucketHandle, fault: str
) -> None:
    store = handle.bucket
    for seconds in (0.15, inf):
        at, name = (store, fault) if fault[:3] == "is_" else (handle, "cut")
        good = getattr(at, name)
        setattr(at, name, True if fault[:3] == "is_" else fault)
        if seconds < inf:
            asyncio.get_running_loop().call_later(seconds, setattr, at, name, good)
            assert await handle.create(KEY, b"1")
            assert await handle.read(KEY) == b"1"
            await handle.delete([KEY])
        else:
            with pytest.raises(Unavailable, match="did not answer as it should"):
                await handle.create(KEY, b"1")
            assert (KEY in store.objects.now) == (fault == "answers")
    if fault == "is_full":
        assert await handle.read(KEY) is None
        with pytest.raises(Unavailable, match="DeleteObjects"):
            await handle.delete([KEY])


async def test_an_answer_that_is_lost_makes_ones_own_object_that_of_another(
    handle: BucketHandle,
) -> None:
    handle.breaks = ["close"]
    assert not await handle.create(KEY, b"1")
    handle.breaks = ["reset"]
    with pytest.raises(Unavailable, match="connection broke"):
        await handle.create("digits/commits/2", b"2")
    handle.breaks = ["close", "reset"]
    await handle.write("digits/commits/3", b"3")
    creating = asyncio.create_task(handle.create("digits/commits/4", b"4"))
    await asyncio.sleep(LAG_S * 0.7)
    handle.bucket.stop()
    handle.bucket.start()
    with contextlib.suppress(Unavailable):
        assert not await creating
    late = asyncio.create_task(handle.create("digits/commits/5", b"5"))
    await asyncio.sleep(0)
    late.cancel()
    await asyncio.sleep(LAG_S)
    assert [each[-1:] for each in await handle.keys("digits/commits")] == [*"12345"]


async def test_a_dead_letter_is_stored_once_though_an_answer_is_lost(handle: BucketHandle) -> None:
    scheduler = handle.bucket.handle("scheduler-0", "scheduler")
    scheduler.breaks = ["close"]
    log = Log.of_run(ObjectStore(scheduler), "digits")
    assert [await log.append(letter(number)) for number in (1, 1, 2)] == [1, 1, 2]
    assert len(await handle.keys("digits/log")) == 2


async def test_what_is_old_wrong_damaged_or_lost(handle: BucketHandle) -> None:
    store, disk = ObjectStore(handle), handle.bucket
    first, second = [await store.put("digits/files", data, suffix="") for data in (b"11", b"2")]
    await asyncio.sleep(0.3)
    moment = asyncio.get_running_loop().time()
    await store.delete([second.key])
    third = await store.put("digits/files", b"3", suffix="")
    handle.stale_s = 0.25
    assert await store.get(second) == b"2" and await store.read(third.key) is None
    assert await store.keys("digits/files") == sorted([first.key, second.key])
    handle.stale_s, handle.num_misdirected = 0, 1
    with pytest.raises(IntegrityError):
        await store.get(first)
    assert await store.get(first) == b"11"
    disk.lose_unsynced(asyncio.get_running_loop().time() - moment)
    assert await store.keys("digits/files") == sorted([first.key, second.key])
    disk.flip(first.key)
    disk.tear(second.key)
    damaged = [await store.read(each.key) for each in (first, second)]
    assert damaged[0] != b"11" and len(damaged[0] or b"") == 2 and damaged[1] == b""
    before, disk.clock_offset = disk.clock, -1000
    await store.write(KEY, b"")
    assert (await store.entries("digits/commits"))[0].modified < before - 990


@pytest.fixture
def server() -> Iterator[Valkey]:
    server = Valkey()
    with server.installed():
        yield server


async def test_faults_of_redis(server: Valkey) -> None:
    url, line = server.url("Scheduler-0", "scheduler"), server.line("scheduler-0")
    once = Retry(NoBackoff(), 0)
    async with redis.from_url(url, retry=once, socket_timeout=0.1) as client:
        server.is_down = True
        with pytest.raises(redis.ConnectionError, match="refused"):
            await client.ping()
        server.start()
        for fault, is_done in (("requests", False), ("answers", True)):
            await client.delete(INDEXED)
            line.cut = "requests" if fault == "requests" else "answers"
            with pytest.raises(redis.TimeoutError):
                await client.set(INDEXED, 1)
            assert (INDEXED.encode() in server.table.now) == is_done
            line.cut = ""
            await asyncio.sleep(0.05)  # what was sent arrives, although nobody waits for it
            assert await client.get(INDEXED) == b"1"
        server.is_hanging = True
        with pytest.raises(redis.TimeoutError):
            await client.set(INDEXED, 2)
        server.is_hanging = False
        await asyncio.sleep(0.05)
        assert await client.get(INDEXED) == b"2"
        line.num_lost = 1
        with pytest.raises(redis.ConnectionError):
            await client.set(INDEXED, 3)
        assert await client.get(INDEXED) == b"3"
        server.is_full = True
        with pytest.raises(OutOfMemoryError):
            await client.set(INDEXED, 4)
        await asyncio.sleep(0.1)
        assert await client.delete(INDEXED) == 1
        for seconds, found in ((0.05, b"3"), (inf, None)):
            server.lose_unsynced(seconds)
            with pytest.raises(redis.ConnectionError, match="closed by server"):
                await client.get(INDEXED)
            assert await client.get(INDEXED) == found
