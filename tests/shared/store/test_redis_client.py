"""What a connection to Redis does when the task that uses it is cancelled."""

import asyncio
from typing import Any

import pytest

from shared.store.redis_client import open_redis

pytestmark = pytest.mark.broker


async def test_a_cancellation_that_comes_as_a_command_is_sent_is_not_lost(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = open_redis(redis_url, timeout=5)
    await client.ping()
    pool: Any = client.connection_pool
    connection = await pool.get_connection()
    send = connection._send_packed_command

    async def sent_as_it_is_cancelled(command: object) -> None:
        await send(command)
        pinging.cancel()

    monkeypatch.setattr(connection, "_send_packed_command", sent_as_it_is_cancelled)
    await pool.release(connection)
    pinging: asyncio.Future[bool] = asyncio.ensure_future(client.ping())
    with pytest.raises(asyncio.CancelledError):
        await pinging
    monkeypatch.undo()
    assert await client.get("nothing") is None, "not the answer of the ping"
    await client.aclose()
