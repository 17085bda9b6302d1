"""Cancels tasks although a library may drop the cancellation, as the NATS and Redis clients do."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from shared.limits import MAX_CLEANUP_S

T = TypeVar("T")


async def cancellable(call: Awaitable[T]) -> T:
    """Await a client's call; raise CancelledError if the task is cancelled during the call.

    Both clients use `asyncio.wait_for`. Before Python 3.12 it may drop a cancellation that arrives
    together with the result. The NATS client also drops a cancellation while it waits for space in
    its write buffer. Without this check the task would never end.
    """
    task = asyncio.current_task()
    assert task is not None
    num_before = task.cancelling()
    try:
        return await call
    finally:
        if task.cancelling() > num_before:
            raise asyncio.CancelledError


async def stop(*tasks: "asyncio.Task[Any]") -> list[BaseException | None]:
    """Cancel ``tasks`` until all have ended; repeats a cancellation that was dropped.

    Returns the error of each task; None if it ended without an error.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=MAX_CLEANUP_S)
    return [None if task.cancelled() else task.exception() for task in tasks]
