"""Orders the scheduler's inputs: messages and ticks."""

import asyncio
from collections import deque
from collections.abc import Callable

from services.scheduler import limits
from services.scheduler.core.inputs import MachineInput, Tick, take_together
from shared.bus.bus import Bus
from shared.messages.contracts import Event, FragmentScored
from shared.messages.subjects import FLUID, Stream, fluid_events


class Inbox:
    """Holds what was heard and not yet applied, in the order in which it came, but scores first.

    A score may complete a group that a trainer waits for, while a device that has generated a
    fragment continues with the next one. Scores have a stream of their own, so their order relative
    to other messages is undefined.
    """

    def __init__(self) -> None:
        self._scores, self._others = deque[MachineInput](), deque[MachineInput]()
        self._filled = asyncio.Event()

    def put(self, event: MachineInput) -> None:
        (self._scores if isinstance(event, FragmentScored) else self._others).append(event)
        self._filled.set()

    @property
    def is_empty(self) -> bool:
        return not self._scores and not self._others

    async def get(self) -> list[MachineInput]:
        """Wait for something; return what is to be applied together next."""
        await self._filled.wait()
        inputs = take_together(self._scores, self._others)
        if self.is_empty:
            self._filled.clear()
        return inputs


async def follow(
    bus: Bus, stream: Stream, inbox: Inbox, note: Callable[[object], None], *, after: int
) -> None:
    """Put the events of a stream into the inbox as they come, and have each noted.

    ``after``: the last that was read.
    """
    filters = fluid_events(bus.run) if stream == FLUID else None
    async for received in bus.follow(stream, filters, after=after):
        if isinstance(received.message, Event):
            inbox.put(received.message)
            note(received.message)


async def tick(inbox: Inbox) -> None:
    while True:
        await asyncio.sleep(limits.TICK_S)
        inbox.put(Tick())
