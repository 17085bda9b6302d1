"""Cancelling what awaits the NATS client."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def cancellable(call: Awaitable[T]) -> T:
    """``call``, of the NATS client, or CancelledError if its task is cancelled meanwhile.

    Before Python 3.12 `asyncio.wait_for`, which the client uses, may lose a cancellation that comes
    together with the result; then the task would never end.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        return await call
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
