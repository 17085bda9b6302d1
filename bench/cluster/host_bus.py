"""The bus as the members of an emulated host have it: what is said to all is received once for all.

In a real run each member is a process of its own, on cores of its own, and receives it by itself;
here two cores stand for those of all hosts, and 32 members would decode each message 32 times.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from shared.bus.bus import Bus
from shared.bus.reader import ReceivedMessage
from shared.messages import subjects
from shared.messages.subjects import Stream

KEPT_GROUPS = 64
"""Groups that members of a host train at a time, at most: two batches on most hosts."""


@dataclass(slots=True)
class Heard:
    """What has come of some subjects since the run began."""

    reading: "asyncio.Task[None] | None" = None
    received: list[ReceivedMessage] = field(default_factory=list)
    more: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, received: ReceivedMessage) -> None:
        self.received.append(received)
        self.more.set()
        self.more = asyncio.Event()


class HostBus(Bus):
    async def follow(
        self, stream: Stream, filters: Sequence[str] | None = None, *, after: int = 0
    ) -> AsyncGenerator[ReceivedMessage]:
        """Yield what `Bus.follow` does."""
        if after or filters is None or not self._is_for_all(stream, filters):
            async for received in Bus.follow(self, stream, filters, after=after):
                yield received
            return
        heard, place = self._heard_of(stream, filters), 0
        while True:
            while place < len(heard.received):
                yield heard.received[place]
                place += 1
            await heard.more.wait()

    async def stored(
        self, stream: Stream, filters: Sequence[str] | None = None
    ) -> tuple[list[ReceivedMessage], int]:
        """Return what `Bus.stored` does; a group that is to be trained is read once for all."""
        if stream is not subjects.TRAIN or filters is None:
            return await Bus.stored(self, stream, filters)
        known: dict[tuple[str, ...], asyncio.Task[tuple[list[ReceivedMessage], int]]]
        known = self.__dict__.setdefault("groups", {})
        key = tuple(filters)
        while len(known) > KEPT_GROUPS:
            del known[next(iter(known))]
        if key not in known:
            known[key] = asyncio.create_task(Bus.stored(self, stream, filters))
        found = await asyncio.shield(known[key])
        if not found[0]:
            known.pop(key, None)  # it is on its way
        return found

    def _is_for_all(self, stream: Stream, filters: Sequence[str]) -> bool:
        is_round = list(filters) == subjects.fluid_subjects(self.run)
        return stream is subjects.EVT or (stream is subjects.FLUID and is_round)

    def _heard_of(self, stream: Stream, filters: Sequence[str]) -> Heard:
        known: dict[tuple[str, ...], Heard] = self.__dict__.setdefault("heard", {})
        heard = known.setdefault((stream.name, *filters), Heard())
        if heard.reading is None:
            heard.reading = asyncio.create_task(self._listen(heard, stream, filters))
        return heard

    async def _listen(self, heard: Heard, stream: Stream, filters: Sequence[str]) -> None:
        async for received in Bus.follow(self, stream, filters):
            heard.add(received)
