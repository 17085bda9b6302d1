"""Opens connections to Redis, and looks whether it is one that a run can trust."""

import asyncio
from typing import Any

import redis.asyncio as redis
import structlog
from redis.asyncio.connection import AbstractConnection

from shared.cancellation import cancellable
from shared.errors import UserError
from shared.telemetry import public

MIN_VERSION = (7, 0)
"""Older ones cannot let a role read keys that it must not write."""

log = structlog.get_logger()


def open_redis(url: str, ca: str | None = None, *, timeout: float) -> "redis.Redis":
    """Return a client, whether or not Redis answers yet.

    Args:
        ca: certificates, as PEM text, that verify a `rediss://` server.
        timeout: seconds for a connection, and for an answer.
    """
    client = redis.from_url(
        url, socket_timeout=timeout, socket_connect_timeout=timeout, **_verified(url, ca)
    )
    pool = client.connection_pool
    pool.connection_class = _cancellable(pool.connection_class)
    return client


def _cancellable(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    """Return connections that keep cancellations: with a time limit the library sends by
    `asyncio.wait_for`."""

    class Cancellable(kind):  # type: ignore[valid-type, misc]
        async def send_packed_command(self, *args: Any, **options: Any) -> None:
            try:
                await cancellable(super().send_packed_command(*args, **options))
            except asyncio.CancelledError:  # the next command would read this one's answer
                await self.disconnect(nowait=True)
                raise

    return Cancellable


async def check_redis(
    client: "redis.Redis", url: str, ca: str | None, *, may_be_open: bool
) -> None:
    """Look who is there; a Redis that does not answer yet is logged, and not looked at.

    Raises:
        UserError: if it refuses the user or the password, is too old, or has no authentication.
    """
    address = public(url)
    try:
        await client.ping()
        _check_version(await client.execute_command("HELLO"), address)  # type: ignore[no-untyped-call]
        if not may_be_open:
            await _check_asks(url, ca, address)
    except redis.AuthenticationError as error:
        raise UserError(
            f"DIGENRL_REDIS_URL: Redis at {address} refuses this user or password"
        ) from error
    except (redis.ConnectionError, redis.TimeoutError) as error:
        log.warning(
            "redis_unavailable", redis=address, setting="DIGENRL_REDIS_URL", error=str(error)
        )
    else:
        log.info("connected", redis=address)


def _check_version(hello: Any, address: str) -> None:
    given = hello if isinstance(hello, dict) else dict(zip(hello[::2], hello[1::2], strict=False))
    text_or_bytes = given.get(b"version", given.get("version", b"0"))
    text = text_or_bytes.decode() if isinstance(text_or_bytes, bytes) else str(text_or_bytes)
    if tuple(int(part) for part in text.split(".")[:2]) < MIN_VERSION:
        wanted = ".".join(str(part) for part in MIN_VERSION)
        raise UserError(
            f"DIGENRL_REDIS_URL: Redis at {address} is {text}, too old; install {wanted} or newer"
        )


async def _check_asks(url: str, ca: str | None, address: str) -> None:
    """Raises UserError if Redis answers without authentication."""
    nobody = open_redis(url, ca, timeout=5)
    nobody.connection_pool.connection_kwargs.update(username=None, password=None)
    try:
        await nobody.ping()
    except (redis.AuthenticationError, redis.ResponseError):
        return
    finally:
        await nobody.aclose()
    raise UserError(
        f"DIGENRL_REDIS_URL: Redis at {address} has no authentication, so any client can change "
        "the run; start it with the redis.conf of `digenrl keys init`, or set "
        "DIGENRL_OPEN_BROKERS=1 on a laptop"
    )


def _verified(url: str, ca: str | None) -> dict[str, Any]:
    return {"ssl_ca_data": ca} if ca is not None and url.startswith("rediss:") else {}
