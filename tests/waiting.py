"""Waiting for what no event announces."""

import asyncio
from collections.abc import Callable


async def until(holds: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: if it does not in so many seconds.
    """
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 -- of objects that know nothing of tests
            await asyncio.sleep(0.01)
