"""Cancels tasks whose library may lose a cancellation, as the clients of NATS and Redis do."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")
MAX_CLEANUP_S = 6.0
"""Seconds that exceed the clean-up of any of our tasks."""


async def cancellable(call: Awaitable[T]) -> T:
    """Await a call of a client; raise CancelledError if its task is cancelled meanwhile.

    Before Python 3.12 `asyncio.wait_for`, which those clients use, may lose a cancellation that
    comes together with the result, and NATS' drops one that comes while it waits for room to write;
    then the task would never end.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        return await call
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


async def stop(*tasks: "asyncio.Task[Any]") -> list[BaseException | None]:
    """Cancel ``tasks`` until all have ended, again where a cancellation was lost.

    Returns the error of each, None for a task that ended without one.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=MAX_CLEANUP_S)
    return [None if task.cancelled() else task.exception() for task in tasks]
