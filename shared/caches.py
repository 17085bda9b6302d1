"""Caches that keep their newest entries."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def keep_newest(cache: dict[K, V], key: K, value: V, size: int) -> None:
    """Make this the newest entry of a cache; the oldest ones beyond ``size`` leave it."""
    cache.pop(key, None)
    cache[key] = value
    while len(cache) > size:
        del cache[next(iter(cache))]
