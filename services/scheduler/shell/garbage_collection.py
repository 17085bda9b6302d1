"""Keeps collections of garbage short, which stop all threads of the process.

Nearly everything here goes as soon as nothing refers to it. Cyclic garbage is small, but finding it
needs a full collection over all objects: with 2,048 devices hundreds of thousands, most of them
waiting messages.
"""

import asyncio
import gc
from collections.abc import Callable

from services.scheduler import limits

YOUNG_THRESHOLD, OLDER_THRESHOLD = 10_000, 4
"""New objects after which young ones are looked at, and after how many such looks older ones."""
UNREACHABLE_COUNT = 1_000_000


def settle_heap() -> None:
    """Leave all objects that there are out of later collections, and full ones to
    `gc_when_idle`.

    Modules, classes and validators live as long as the process, and are a hundred thousand.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_THRESHOLD, OLDER_THRESHOLD, UNREACHABLE_COUNT)


async def gc_when_idle(is_calm: Callable[[], bool]) -> None:
    """Collect all garbage periodically, when no input waits."""
    while True:
        await asyncio.sleep(limits.COLLECT_S)
        for _ in range(limits.MAX_IDLE_CHECKS):
            if is_calm():
                break
            await asyncio.sleep(limits.IDLE_CHECK_S)
        gc.collect()
