"""What a broker of a world has: values by keys, in order, and how everything was a while ago."""

import asyncio
from bisect import bisect_left, insort
from collections import deque
from typing import Generic, TypeVar

K = TypeVar("K", str, bytes)
V = TypeVar("V")
KEPT_S = 120.0
"""Seconds of which it is known how everything was."""


class Table(Generic[K, V]):
    def __init__(self) -> None:
        self.now: dict[K, V] = {}
        self._order: list[K] = []
        self._changes: deque[tuple[float, K, V | None]] = deque()

    def set(self, key: K, value: V | None) -> None:
        """Change a value; None: it is deleted."""
        time, old = asyncio.get_running_loop().time(), self.now.get(key)
        self._changes.append((time, key, old))
        while self._changes[0][0] < time - KEPT_S:
            self._changes.popleft()
        if value is not None:
            self.now[key] = value
            if old is None:
                insort(self._order, key)
        elif old is not None:
            del self.now[key]
            del self._order[bisect_left(self._order, key)]

    def under(self, prefix: K) -> list[K]:
        """Return all keys that begin so, in order."""
        begin = end = bisect_left(self._order, prefix)
        while end < len(self._order) and self._order[end].startswith(prefix):
            end += 1
        return self._order[begin:end]

    def before(self, seconds: float) -> "Table[K, V]":
        """Return how everything was so many seconds ago."""
        then, table = asyncio.get_running_loop().time() - seconds, Table[K, V]()
        table.now, table._changes = dict(self.now), self._changes.copy()
        while table._changes and table._changes[-1][0] > then:
            _, key, old = table._changes.pop()
            if old is None:
                table.now.pop(key, None)
            else:
                table.now[key] = old
        table._order = sorted(table.now)
        return table
