"""Collects what the scheduler hears, in the order in which it is applied: messages, ticks, and
failures for work that never arrives."""

import asyncio
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from services.scheduler.core.machine import MachineInput, Tick
from shared.bus.bus import Bus, Received
from shared.messages.contracts import (
    Event,
    FragmentFailed,
    FragmentScored,
    GroupFailed,
)
from shared.messages.subjects import (
    DLQ,
    STREAMS,
    Stream,
    fragment_slot,
    group_slot,
    is_unscored,
)
from shared.telemetry import DLQ_MESSAGES

TICK_S = 1.0
STREAM_NAMES = frozenset(stream.name for stream in STREAMS)
SEQUENCE = re.compile(r"[1-9][0-9]{0,17}\Z", re.ASCII)

log = structlog.get_logger()


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


async def follow(bus: Bus, stream: Stream, inbox: Inbox, *, after: int) -> None:
    """Put the events of a stream into the inbox as they come; ``after``: the last that was read."""
    async for received in bus.follow(stream, after=after):
        if isinstance(received.message, Event):
            inbox.put(received.message)


async def tick(inbox: Inbox) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        inbox.put(Tick())


@dataclass(slots=True)
class DeadLetters:
    """Follows the stream of dead letters, and counts those whose bytes were no message."""

    _bus: Bus
    _put: Callable[[MachineInput], None]
    num_quarantined: int = 0

    async def follow(self) -> None:
        async for received in self._bus.follow(DLQ):
            if is_unscored(received.subject):
                continue  # their fragment is scored, without them
            if not received.subject.startswith("$JS"):
                self.num_quarantined += 1
                DLQ_MESSAGES.set(self.num_quarantined)
            failure = await failure_of(self._bus, received)
            if failure is not None:
                self._put(failure)


async def failure_of(bus: Bus, received: Received) -> MachineInput | None:
    """The failure that a message of DG_DLQ means for this run; None if none."""
    subject, reason = await _subject(bus, received)
    if subject is None or not subject.startswith(f"dg.{bus.run}."):
        return None
    slot = fragment_slot(subject)
    if slot is not None:
        return FragmentFailed(slot=slot, stage="delivery", reason=reason)
    group = group_slot(subject)
    if group is not None:
        return GroupFailed(batch=group[0], group=group[1], attempt=group[2], reason=reason)
    return None


async def _subject(bus: Bus, received: Received) -> tuple[str | None, str]:
    if not received.subject.startswith("$JS"):
        stream, sequence = received.subject.split(".")[-2:]
        reason = "its message cannot be decoded, or is of another kind"
    else:
        try:
            advisory = json.loads(received.data)
            stream, sequence = str(advisory["stream"]), str(int(advisory["stream_seq"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None, ""
        reason = "it was delivered several times and never finished"
    if stream not in STREAM_NAMES or not SEQUENCE.match(sequence):
        log.error("dead_letter_of_nothing", subject=received.subject[:200])
        return None, ""
    return await bus.stored_subject(stream, int(sequence)), reason
