"""Streams are as large as a run needs them, or the run says why not, on a real NATS server."""

import pytest
from nats.js import JetStreamContext

from digenrl.local.nats_config import STORE_BYTES
from shared.bus.bus import Bus
from shared.errors import UserError
from shared.messages.subjects import TASK, TRAJ

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
    nats_url: str,
) -> None:
    async with Bus.connect(nats_url, run="test", name="test") as bus:
        await bus.ensure_streams()
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
            await bus.ensure_streams({TASK.name: 2 * STORE_BYTES})
