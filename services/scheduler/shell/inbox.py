"""Collects what the scheduler hears, in the order in which it is applied: messages and ticks."""

import asyncio
import itertools
from collections.abc import Callable

from services.scheduler.core.machine import MachineInput, Tick
from shared.bus.bus import Bus
from shared.messages.contracts import Event, FragmentScored
from shared.messages.subjects import Stream

TICK_S = 1.0


class Inbox:
    """Holds what was heard and not yet applied, in the order in which it came, but scores first.

    A group may be whole with a score, and a trainer waits for that, while a device that has
    generated a fragment goes on with the next one. Scores have a stream of their own, so nobody
    may rely on their order relative to other messages.
    """

    def __init__(self) -> None:
        self._queue: asyncio.PriorityQueue[tuple[bool, int, MachineInput]] = asyncio.PriorityQueue()
        self._numbers = itertools.count()

    def put(self, event: MachineInput) -> None:
        waits = not isinstance(event, FragmentScored)
        self._queue.put_nowait((waits, next(self._numbers), event))

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()

    async def get(self) -> MachineInput:
        _, _, event = await self._queue.get()
        return event


async def follow(
    bus: Bus, stream: Stream, inbox: Inbox, note: Callable[[Event], None], *, after: int
) -> None:
    """Put the events of a stream into the inbox as they come, and have each noted.

    ``after``: the last that was read.
    """
    async for received in bus.follow(stream, after=after):
        if isinstance(received.message, Event):
            inbox.put(received.message)
            note(received.message)


async def tick(inbox: Inbox) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        inbox.put(Tick())
