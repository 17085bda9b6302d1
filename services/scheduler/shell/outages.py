"""Handles outages: a broker or the store is away, streams are full, or streams are lost."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import structlog
from redis.exceptions import RedisError

from shared.bus.bus import Bus
from shared.bus.streams import StreamState
from shared.errors import DigenRLError, Unavailable
from shared.messages import subjects
from shared.process.service import Health

RETRY_S = 0.5
LOOK_S = 1.0
NEARLY_FULL = 0.9

T = TypeVar("T")

log = structlog.get_logger()


async def retry(work: Callable[[], Awaitable[T]]) -> T:
    """The result of ``work``, over outages of the store, the index or the broker."""
    while True:
        try:
            return await work()
        except (Unavailable, RedisError, OSError) as error:
            log.warning("retrying", error=repr(error))
            await asyncio.sleep(RETRY_S)


class StreamsLost(DigenRLError):
    """Messages are gone on which the scheduler's state rests."""


@dataclass(frozen=True, slots=True)
class StreamWatch:
    """Watches the streams that a run goes through."""

    bus: Bus
    health: Health
    make_room: Callable[[], None]
    """Called as long as a stream is nearly full."""

    async def run(self, before: Mapping[str, StreamState | None]) -> None:
        """Look for ever; ``before``: the streams' states when they were made.

        Raises:
            StreamsLost: as soon as a stream is gone, was made again or set back.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                now = await self.bus.stream_states()
            except Unavailable as error:
                self._say(str(error))
                continue
            lost = [n for n, state in before.items() if state is None or state.is_lost_in(now[n])]
            if lost:
                raise StreamsLost(f"{', '.join(lost)}: messages are lost")
            before = now
            self._look_for_room(now)

    def _look_for_room(self, states: Mapping[str, StreamState | None]) -> None:
        slots = ((stream.name, states[stream.name]) for stream in subjects.STREAMS if stream.slots)
        full = {name for name, state in slots if state is not None and state.filled > NEARLY_FULL}
        full.update(self.bus.full.values())
        if full:
            self.make_room()
            self._say(f"{', '.join(sorted(full))}: full; messages wait for room")
        elif not self.health.ready:
            log.info("streams_in_order")
            self.health.is_ready()

    def _say(self, reason: str) -> None:
        if self.health.reason != reason:
            log.error("streams_not_in_order", reason=reason)
            self.health.is_not_ready(reason)
