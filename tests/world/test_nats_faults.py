"""What faults do to the NATS server in memory and to its connections."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.js.errors import APIError, KeyNotFoundError, NotFoundError

from digenrl.local.brokers.nats_config import server_config
from shared.bus import queue
from shared.bus.bus import Bus
from shared.bus.streams import stream_config
from shared.messages.contracts import GenerateFragment
from shared.messages.subjects import EVT, TASK
from tests.world.nats_server import NatsServer
from tests.world.nats_transport import Network, installed

SLOT = "dg.r.task.a.1.0.0."


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Network]:
    network, config = Network(), server_config(tmp_path, listen="host:4222", keys="secret")
    server = network.servers["host", 4222] = NatsServer(config)
    server.start()
    with installed(network):
        yield network


@pytest.fixture
def server(network: Network) -> NatsServer:
    server = network.servers["host", 4222]
    assert isinstance(server, NatsServer)
    return server


async def connected(ping_interval: float = 5.0, **options: int) -> Client:
    client = await nats.connect(
        "nats://digenrl:secret@host:4222", name="one", reconnect_time_wait=0.01,
        max_reconnect_attempts=-1, ping_interval=ping_interval, max_outstanding_pings=2, **options,
    )  # fmt: skip
    for stream in (TASK, EVT):
        await client.jetstream().add_stream(stream_config(stream))
    return client


async def until_connected(client: Client, reconnects: int) -> None:
    async with asyncio.timeout(5):
        while client.stats["reconnects"] < reconnects or not client.is_connected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def stored(client: Client, name: int, seconds: float = 0.1) -> int:
    found = await client.jetstream().publish(f"{SLOT}{name}", b"x", timeout=seconds)
    return int(found.seq)


async def test_what_is_late_keeps_its_order(network: Network) -> None:
    client, draw = await connected(), random.Random(1)
    [connection] = network.connections
    assert (connection.name, connection.user) == ("one", "digenrl")
    connection.to_server.delay = connection.to_client.delay = lambda: draw.random() / 50
    heard = await client.subscribe("a.*")
    for number in range(20):
        await client.publish(f"a.{number}")
        await client.flush()
    assert [(await heard.next_msg()).subject for _ in range(20)] == [f"a.{n}" for n in range(20)]
    await client.close()
    await asyncio.sleep(0.1)
    assert network.connections == []


async def test_a_cut_in_one_direction_holds_what_goes_there(network: Network) -> None:
    client = await connected()
    [connection] = network.connections
    connection.to_client.cut()
    with pytest.raises(nats.errors.TimeoutError):
        await stored(client, 0)
    connection.mend()
    with pytest.raises(APIError, match="per subject"):
        await stored(client, 0)
    await client.close()


async def test_a_cut_that_lasts_ends_the_connection_and_a_reset_at_once(network: Network) -> None:
    client = await connected(ping_interval=0.05)
    [silent] = network.connections
    silent.cut()
    await until_connected(client, 1)
    silent.mend()
    assert await stored(client, 0) == 1
    [other] = network.connections
    other.drop()
    await until_connected(client, 2)
    assert await stored(client, 1) == 2
    await client.close()


async def test_a_server_that_hung_takes_what_came_meanwhile(server: NatsServer) -> None:
    client, other = await connected(), await connected()
    server.hang()
    with pytest.raises(nats.errors.TimeoutError):
        await stored(client, 0)
    await client.close()
    server.go_on()
    assert await stored(other, 1) == 2
    await other.close()


async def test_what_a_crash_loses(server: NatsServer) -> None:
    client = await connected()
    jetstream = client.jetstream()
    pulled = await jetstream.pull_subscribe("dg.r.task.>", durable="q", stream=TASK.name)
    assert [await stored(client, n) for n in range(3)] == [1, 2, 3]
    before = await jetstream.stream_info(TASK.name)
    await asyncio.sleep(0.5)
    for message in await pulled.fetch(2):
        await message.ack()
    await jetstream.delete_msg(TASK.name, 1)
    assert await stored(client, 3) == 4
    await asyncio.sleep(0.2)
    server.lose_unsynced(0.4)
    await until_connected(client, 1)
    after = await jetstream.stream_info(TASK.name)
    assert (after.created, after.state) == (before.created, before.state.evolve(consumer_count=1))
    [message] = await pulled.fetch(1)
    assert (message.metadata.num_delivered, message.metadata.sequence.stream) == (1, 1)
    server.wipe()
    await until_connected(client, 2)
    with pytest.raises(NotFoundError):
        await jetstream.stream_info(TASK.name)
    await jetstream.add_stream(stream_config(TASK))
    assert (await jetstream.stream_info(TASK.name)).created > before.created
    await client.close()


async def test_nats_may_go_while_what_is_no_message_is_taken_off_a_queue(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connected(pending_size=-1)
    taken = asyncio.Event()

    async def restarted(*_: object) -> None:
        server.kill()
        await asyncio.sleep(0.05)
        taken.set()

    monkeypatch.setattr(queue, "quarantine", restarted)
    await stored(client, 0)
    work = queue.WorkQueue(client.jetstream(), "r", TASK, "q", GenerateFragment)
    waiting = asyncio.create_task(work.next())
    await taken.wait()
    await asyncio.wait({waiting}, timeout=0.1)
    assert not waiting.done()
    waiting.cancel()
    await client.close()


async def test_a_connection_that_was_reset_ends_without_an_error(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Client.close

    async def closed(client: Client) -> None:
        await close(client)
        raise ConnectionResetError  # what it does after a reset while it sends what is left

    monkeypatch.setattr(Client, "close", closed)
    async with Bus.connect("nats://digenrl:secret@host:4222", run="r", name="one"):
        assert server.is_up


async def test_a_full_disk_silences_a_stream_until_the_next_start(server: NatsServer) -> None:
    client = await connected()
    await stored(client, 0)
    server.is_full = True
    with pytest.raises(APIError, match="per subject"):
        await stored(client, 0)
    with pytest.raises(nats.errors.TimeoutError):
        await stored(client, 1)
    server.is_full = False
    with pytest.raises(nats.errors.TimeoutError):
        await stored(client, 1)
    server.kill()
    with pytest.raises((nats.errors.Error, OSError)):
        await stored(client, 1)
    server.start()
    await until_connected(client, 1)
    assert await stored(client, 1) == 2
    await client.close()


async def test_a_clock_that_jumps_ends_what_waits(server: NatsServer) -> None:
    client = await connected()
    bucket = await client.jetstream().create_key_value(bucket="b", ttl=0.4)
    await bucket.put("k", b"v")
    await asyncio.sleep(0.2)
    server.clock_offset = -100.0
    await asyncio.sleep(0.3)
    assert (await bucket.get("k")).value == b"v"
    server.clock_offset = 0.0
    await asyncio.sleep(0.5)
    with pytest.raises(KeyNotFoundError):
        await bucket.get("k")
    await client.close()
