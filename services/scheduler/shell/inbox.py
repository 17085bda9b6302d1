"""What the scheduler has heard and not yet applied."""

import asyncio
import itertools

from services.scheduler.core.machine import MachineInput
from shared.messages.contracts import FragmentScored


class Inbox:
    """In the order in which it came, but scores first: a group may be whole with them, for which a
    trainer waits, while a device that has generated a fragment goes on with the one it has in hand.

    Scores are a stream of their own, of which nobody may think that it comes in step with others.
    """

    def __init__(self) -> None:
        self._queue: asyncio.PriorityQueue[tuple[bool, int, MachineInput]] = asyncio.PriorityQueue()
        self._numbers = itertools.count()

    def put(self, event: MachineInput) -> None:
        waits = not isinstance(event, FragmentScored)
        self._queue.put_nowait((waits, next(self._numbers), event))

    async def get(self) -> MachineInput:
        _, _, event = await self._queue.get()
        return event
