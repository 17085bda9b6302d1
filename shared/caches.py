"""Caches that keep their newest entries."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


def keep_newest(cache: dict[K, V], key: K, value: V, size: int) -> None:
    """Make this the newest entry of a cache; the oldest ones beyond ``size`` leave it."""
    cache.pop(key, None)
    cache[key] = value
    while len(cache) > size:
        del cache[next(iter(cache))]


class SharedResults(Generic[K, V]):
    """Computes a value once for all concurrent callers, and keeps the newest values.

    A failed computation, or one that returned None, is repeated at the next call.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._tasks: dict[K, asyncio.Task[V]] = {}

    async def get(self, key: K, compute: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """Return the value of a key; ``compute`` is called if it is not kept."""
        task = self._tasks.get(key)
        if task is None or (task.done() and not _has_value(task)):
            task = asyncio.create_task(compute())
            task.add_done_callback(_has_value)
            keep_newest(self._tasks, key, task, self._size)
        return await asyncio.shield(task)


def _has_value(task: "asyncio.Task[Any]") -> bool:
    return not task.cancelled() and task.exception() is None and task.result() is not None
