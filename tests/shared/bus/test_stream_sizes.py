"""Streams are as large as a run needs them, or the run says why not, on a real NATS server."""

import contextlib

import pytest
from nats.js import JetStreamContext

from digenrl.local.limits import MAX_JETSTREAM_BYTES
from shared.bus.bus import Bus
from shared.bus.streams import follower_config, stream_config
from shared.errors import UserError
from shared.limits import MAX_CONSUMERS, MAX_HEADERS_BYTES, MAX_MEMBERS, MAX_PIECES, MAX_SUMS_BYTES
from shared.messages.subjects import FLUID, TASK, TRAJ
from tests.shared.messages.test_fluid import exchange, pieces_of

MIB = 1 << 20


async def size_of(jetstream: JetStreamContext, name: str) -> int:
    return (await jetstream.stream_info(name)).config.max_bytes or 0


async def test_a_stream_grows_with_what_a_run_needs_and_never_shrinks(nats_url: str) -> None:
    async with Bus.connect(nats_url, run="test", name="test") as bus:
        await bus.ensure_streams({TASK.name: TASK.max_bytes + 1})
        assert await size_of(bus.jetstream, TASK.name) == 2 * TASK.max_bytes
        assert await size_of(bus.jetstream, TRAJ.name) == TRAJ.max_bytes
        for need, size in ((3 * TASK.max_bytes, 3), (1, 3)):
            await bus.ensure_streams({TASK.name: need})
            assert await size_of(bus.jetstream, TASK.name) == size * TASK.max_bytes


async def test_a_stream_of_an_operators_size_keeps_it_and_a_run_that_needs_more_is_refused(
    bus: Bus,
) -> None:
    config = (await bus.jetstream.stream_info(TASK.name)).config
    await bus.jetstream.update_stream(config.evolve(max_bytes=100 * MIB + 1))
    await bus.ensure_streams({TASK.name: 100 * MIB})
    assert await size_of(bus.jetstream, TASK.name) == 100 * MIB + 1
    need = 100 * MIB + 2
    with pytest.raises(UserError, match=r"schedule\.fragment_size: .* DG_TASK .*--max-bytes"):
        await bus.ensure_streams({TASK.name: need})


@pytest.mark.parametrize("exists", [False, True])
async def test_a_server_without_room_is_named_with_the_key_that_gives_it_some(
    nats_url: str, exists: bool
) -> None:
    async with Bus.connect(nats_url, run="test", name="test") as bus:
        if exists:
            await bus.ensure_streams()
        with pytest.raises(UserError, match=r"DG_TASK may need .*max_file_store"):
            await bus.ensure_streams({TASK.name: 2 * MAX_JETSTREAM_BYTES})


async def test_a_stream_of_an_earlier_release_takes_larger_messages_and_more_readers(
    nats_url: str,
) -> None:
    async with Bus.connect(nats_url, run="test", name="test") as bus:
        former = stream_config(FLUID).evolve(max_msg_size=68 * 1024, max_consumers=1000)
        await bus.jetstream.add_stream(former)
        await bus.ensure_streams()
        config = (await bus.jetstream.stream_info(FLUID.name)).config
        assert config.max_msg_size == MAX_SUMS_BYTES + MAX_HEADERS_BYTES
        assert config.max_consumers == MAX_CONSUMERS


async def test_the_sums_of_as_many_members_as_there_may_be_go_over_the_bus(bus: Bus) -> None:
    message = exchange(pieces_of(MAX_PIECES), MAX_MEMBERS)
    await bus.publish(message)
    async with contextlib.aclosing(bus.follow(FLUID)) as messages:
        received = await anext(messages)
    assert received.message == message


async def test_more_than_a_thousand_devices_can_read_a_stream(bus: Bus) -> None:
    """NATS 2.15 allows a thousand where a stream does not say how many."""
    for number in range(1001):
        reader = follower_config(f"_INBOX.{number}", ["dg.test.fluid.>"], 1)
        await bus.jetstream.add_consumer(FLUID.name, reader)
