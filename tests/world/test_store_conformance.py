"""The store and the Redis of a world, and SeaweedFS and Valkey: the same cases on both.

What the ones in memory do not model stands at the top of their modules.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import redis.asyncio as redis
from redis.exceptions import NoPermissionError, ResponseError, WatchError

from digenrl.local.brokers.embedded import Brokers, plan_brokers
from digenrl.local.brokers.seaweedfs import OWNER
from digenrl.local.secrets.keys import load_keys
from shared.errors import IntegrityError, LeaseLost, Unavailable
from shared.messages.contracts import ObjectRef
from shared.messages.rights import ROLES
from shared.run.versions import VersionIndex
from shared.store import ObjectStore
from shared.store.redis_client import check_redis, open_redis
from tests.brokers import StartProgram, program
from tests.local import test_roles as roles
from tests.local.test_roles import Stores, Url, may, stores_of, version
from tests.shared.store.test_objects import CASES, Case
from tests.world.bucket import Bucket
from tests.world.valkey import Valkey

RUNS = ("digits", "w*")
"""The second one is a rule that is too wide, as `*` is for slashes as well."""


async def what_is_written_last_is_read_and_listed(stores: Stores) -> None:
    store = stores(OWNER)
    for key in ("digits/x/1", "digits/x/a/below", "digits/x/empty", "digits/xy"):
        assert await store.create(key, b"")
    assert not await store.create("digits/x/empty", b"other")
    assert await store.read("digits/x/empty") == b"" and await store.read("digits/x") is None
    assert [await store.backend.size(f"digits/x/{key}") for key in ("1", "no")] == [0, None]
    found = await store.entries("digits/x")
    assert [each.key[9:] for each in found] == ["1", "a/below", "empty"]
    assert sorted(await store.backend.keys("digits/x")) == [each.key for each in found]
    await asyncio.sleep(1.1)
    await store.write("digits/x/empty", b"12345")
    later = await store.entries("digits/x")
    assert later[:2] == found[:2] and found[2].modified % 1 == 0
    assert later[2].size == 5 and later[2].modified > found[2].modified
    await store.delete(["digits/x/1", "digits/x/no"])
    assert await store.keys("digits/x") == ["digits/x/a/below", "digits/x/empty"]
    assert await store.create("digits/x/1", b"anew")


async def parts_of_objects_are_read(stores: Stores) -> None:
    store, data = stores(OWNER), bytes(range(256)) * (10 << 10)
    ref = await store.put("digits/x", data, suffix=".bin")
    for first in (0, 1000, len(data) - 1):
        assert b"".join([chunk async for chunk in store.stream(ref, first)]) == data[first:]
    for first in (len(data), len(data) + 1):
        with pytest.raises(Unavailable, match="did not answer as it should"):
            [chunk async for chunk in store.stream(ref, first)]
    await store.write(ref.key, data[:-1])
    with pytest.raises(IntegrityError, match="does not match its reference"):
        await store.get(ref)
    none = ObjectRef(key="digits/x/none", sha256=ref.sha256, size=1)
    with pytest.raises(IntegrityError, match="not in the store"):
        [chunk async for chunk in store.stream(none)]


async def of_several_keys_those_are_deleted_that_may_be(stores: Stores) -> None:
    keys = ["digits/files/reward.1", "digits/commits/1", "digits/files/reward.2"]
    for key in keys:
        await stores(OWNER).write(key, b"")
    with pytest.raises(Unavailable, match="request failed for key digits/commits/1: Access Denied"):
        await stores("reward").delete(keys)
    assert [await stores(OWNER).read(key) for key in keys] == [None, b"", None]


async def a_rule_that_is_too_wide_lets_an_intruder_in(stores: Stores) -> None:
    assert await may(stores("reward").write("wide/commits/files/reward.1", b""))
    assert not await may(stores("reward").write("wide/commits/1", b""))
    assert not await may(stores("reward").write("another/files/reward.1", b""))


async def the_index_of_versions_is_one_schedulers_at_a_time(url: Url) -> None:
    async with (
        VersionIndex.connect(url("scheduler"), run="digits") as first,
        VersionIndex.connect(url("rollout"), run="digits") as worker,
    ):
        await first.rebuild([])
        await asyncio.gather(*(first.publish(version(0)) for _ in range(8)))
        await first.publish(version(1))
        with pytest.raises(IntegrityError, match="is at 1; it cannot take 3"):
            await first.publish(version(3))
        assert [await worker.lookup(number) for number in range(3)] == [
            version(0),
            version(1),
            None,
        ]
        with pytest.raises(NoPermissionError):
            await worker.publish(version(2))
        await VersionIndex(first._redis, "digits", epoch=2).publish(version(2))
        for writes in (first.publish(version(3)), first.rebuild([])):
            with pytest.raises(LeaseLost):
                await writes
        await VersionIndex(first._redis, "digits", epoch=3).rebuild([])
        assert await worker.lookup(2) is None
        await first.try_to_write()


async def a_transaction_is_whole_or_not_at_all(url: Url) -> None:
    key, other, far = "dg:wv:own:1", "dg:wv:own:2", "foreign"
    async with client_of(url("scheduler")) as client, client.pipeline() as pipe:
        assert await client.set(key, "1") and await client.delete(key, other) == 1
        for change in (client.set(key, "1"), client.set(key, "1"), client.delete(key)):
            await pipe.watch(key, other)
            await change
            with pytest.raises(WatchError):
                await queued(pipe, ("SET", other, "2"))
        await pipe.watch(key)
        assert await client.delete(key) == 0
        done = await queued(pipe, ("SET", other, "2"), ("GET", other), ("GET", key))
        assert done == [True, b"2", None]
        with pytest.raises(NoPermissionError, match=r"# 2 .*No permissions to access a key"):
            await queued(pipe, ("SET", key, "3"), ("SET", far, "3"))
        with pytest.raises(ResponseError, match="wrong number of arguments for 'get' command"):
            await queued(pipe, ("SET", key, "3"), ("GET",))
        assert await client.get(key) is None
        assert [each async for each in client.scan_iter("dg:wv:own:*")] == [other.encode()]
        with pytest.raises(ResponseError, match="EXEC without MULTI"):
            await client.execute_command("EXEC")  # type: ignore[no-untyped-call]


async def queued(pipe: Any, *commands: tuple[str, ...]) -> Any:
    pipe.multi()
    for command in commands:
        pipe.execute_command(*command)
    return await pipe.execute()


async def services_take_it_for_one_that_they_can_trust(url: Url) -> None:
    for role in ROLES:
        for protocol in (2, 3):
            async with redis.from_url(url(role), protocol=protocol) as client:
                await check_redis(client, url(role), None, may_be_open=False)
                assert await client.ping()


@contextlib.asynccontextmanager
async def client_of(url: str) -> "AsyncIterator[redis.Redis]":
    client = open_redis(url, timeout=5)
    try:
        yield client
    finally:
        await client.aclose()


BUCKET_CASES: list[Callable[[Stores], Awaitable[None]]] = [
    what_is_written_last_is_read_and_listed,
    parts_of_objects_are_read,
    of_several_keys_those_are_deleted_that_may_be,
    a_rule_that_is_too_wide_lets_an_intruder_in,
]
REDIS_CASES: list[Callable[[Url], Awaitable[None]]] = [
    the_index_of_versions_is_one_schedulers_at_a_time,
    a_transaction_is_whole_or_not_at_all,
    services_take_it_for_one_that_they_can_trust,
]


@pytest.fixture
def planned(tmp_path: Path) -> Brokers:
    return plan_brokers(tmp_path / "brokers", load_keys(tmp_path / "brokers"), runs=RUNS)


def stores_in_memory() -> Stores:
    epoch = time.time() - asyncio.get_running_loop().time()
    bucket = Bucket(RUNS, Random(0), epoch)
    return lambda role: ObjectStore(bucket.handle("tests", role))


@pytest.mark.parametrize(
    "case", [*BUCKET_CASES, roles.each_role_writes_and_deletes_where_it_is_described_and_reads_all]
)
async def test_the_bucket(case: Callable[[Stores], Awaitable[None]]) -> None:
    await case(stores_in_memory())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_the_bucket_keeps_what_every_store_promises(case: Case) -> None:
    await case(stores_in_memory()(OWNER))


@pytest.mark.broker
async def test_seaweedfs(planned: Brokers, start: StartProgram) -> None:
    await asyncio.to_thread(start, program(planned, "objects"))
    for case in BUCKET_CASES:
        await case(stores_of(planned))


@pytest.mark.parametrize(
    "case", [*REDIS_CASES, roles.each_role_does_in_redis_what_is_described_and_nobody_is_anonymous]
)
async def test_the_redis(case: Callable[[Url], Awaitable[None]]) -> None:
    server = Valkey()
    with server.installed():
        await case(lambda role: server.url("tests", role))


@pytest.mark.broker
async def test_valkey(planned: Brokers, start: StartProgram) -> None:
    await asyncio.to_thread(start, program(planned, "valkey"))
    for case in REDIS_CASES:
        await case(lambda role: planned.secrets[role]["DIGENRL_REDIS_URL"])
