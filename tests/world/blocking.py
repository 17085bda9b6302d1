"""Runs blocking code of the product on the event loop, so that virtual time passes while it waits.

The code runs in a greenlet of the loop's own thread: no thread, and nothing that the seed does not
decide.
"""

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from greenlet import getcurrent, greenlet

T = TypeVar("T")


async def run_blocking(function: Callable[..., T], *arguments: Any) -> T:
    """Return the result of blocking code, which may call `wait_for`."""
    inner = greenlet(function)
    inner.gr_context = contextvars.copy_context()
    found = inner.switch(*arguments)
    while not inner.dead:
        try:
            result = await found
        except BaseException as error:
            found = inner.throw(error)
        else:
            found = inner.switch(result)
    return found  # type: ignore[no-any-return]


def is_blocking() -> bool:
    """Whether the caller is code that `run_blocking` runs."""
    return getcurrent().parent is not None


def wait_for(awaitable: Awaitable[T]) -> T:
    """Return the result of ``awaitable``; the event loop goes on meanwhile."""
    return getcurrent().parent.switch(awaitable)  # type: ignore[no-any-return]


@contextmanager
def sleeping_on_the_loop() -> Iterator[None]:
    """Makes `time.sleep` of blocking code sleep on the event loop."""
    sleep = time.sleep

    def sleep_on_loop(seconds: float) -> None:
        wait_for(asyncio.sleep(seconds)) if is_blocking() else sleep(seconds)

    with patch("time.sleep", sleep_on_loop):
        yield
