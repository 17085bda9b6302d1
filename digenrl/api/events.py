"""One stream of server-sent events of all that happens in a run.

    id: c13.l10.e2            a position in the feed (feed.py); Last-Event-ID continues after it
    event: commit             hello, commit, dead_letter, settled, request, phase, alarm,
                              evaluation
    data: {"version": 12, ...}

Between them are events named `run` without an id: the scheduler's view of the run, after each
change. They are not repeated. A slow reader receives events at its own pace, and continues at its
position; a reader that stops reading is disconnected.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Header, HTTPException, Query
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from digenrl.api.feed import Fact, Feed, Position
from shared.errors import Unavailable
from shared.process.http_api import errors
from shared.process.service import ENDING

POLL_S = 0.5
RETRY_MS = 1000
"""Milliseconds after which a browser connects again."""
COMMENT_S = 15.0
"""Seconds of silence after which something is sent, so that no proxy closes the connection."""
SEND_S = 30.0
"""Seconds that a reader may leave what is sent unread, beyond what its connection holds."""
MAX_READERS = 256
START = "start"
EXAMPLE = (
    "retry: 1000\n\nid: c13.l10.e2\nevent: commit\n"
    'data: {"version": 12, "batch": 11, "reward_mean": 0.71}\n\n'
)
After = Annotated[
    str,
    Query(
        max_length=64, examples=["c13.l10.e2"],
        description="the id of the last event that is known, as Last-Event-ID; start: from the "
        "beginning of the run; nothing: from now on",
    ),
]  # fmt: skip
LastEventId = Annotated[str, Header(max_length=64, description="goes before `after`")]
Say = Callable[[], Awaitable[Any | None]]

log = structlog.get_logger()


class EventStream(StreamingResponse):
    """Streams events, and leaves a reader that reads nothing."""

    media_type = "text/event-stream"

    events: "Events"
    """Where its reader was admitted."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.events.num_readers -= 1

    async def stream_response(self, send: Send) -> None:
        async def patient(message: Message) -> None:
            async with asyncio.timeout(SEND_S):
                await send(message)

        try:
            await super().stream_response(patient)
        except TimeoutError:
            log.warning("event_reader_left", seconds=SEND_S)


@dataclass(slots=True)
class Events:
    """Serves the events of a run."""

    feed: Feed
    say_run: Say
    """Returns the scheduler's present view of the run; None without one."""
    num_readers: int = 0
    """Readers that were admitted and have not left."""

    async def admit(self, last_id: str) -> EventStream:
        """Return the stream of what happens after the event ``last_id``.

        A reader counts from here on, so that those who wait for the store count as well.

        Raises:
            HTTPException: if there are too many readers, or ``last_id`` is no id of an event.
        """
        if self.num_readers >= MAX_READERS:
            raise HTTPException(
                503, f"{MAX_READERS} readers are all; try again later", {"retry-after": "5"}
            )
        self.num_readers += 1
        try:
            at = await self._position(last_id)
        except BaseException:
            self.num_readers -= 1
            raise
        hello = f"retry: {RETRY_MS}\n\n".encode()
        hello += encoded("hello", {"run": self.feed.run}, str(at))
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        answer = EventStream(self.stream(at, hello), headers=headers)
        answer.events = self
        return answer

    async def _position(self, last_id: str) -> Position:
        if not last_id:
            return await self.feed.now()
        at = Position() if last_id == START else Position.parse(last_id)
        if at is None:
            raise HTTPException(422, f"after: {last_id!r} is no id of an event, nor {START!r}")
        return at

    async def stream(self, at: Position, hello: bytes) -> AsyncIterator[bytes]:
        yield hello
        sent_run, silent = None, 0.0
        while not ENDING.is_set():
            facts = await self._after(at)
            for at, fact in facts:
                if fact.name:
                    yield encoded(fact.name, fact.fields, str(at))
            if facts:
                silent = 0.0
                continue
            run = await self.say_run()
            if run is not None and run != sent_run:
                sent_run, silent = run, 0.0
                yield encoded("run", run)
            elif silent >= COMMENT_S:
                silent = 0.0
                yield b":\n\n"
            await asyncio.sleep(POLL_S)
            silent += POLL_S

    async def _after(self, at: Position) -> list[tuple[Position, Fact]]:
        """Return what has happened since; nothing while the store does not answer."""
        try:
            return await self.feed.after(at)
        except Unavailable as error:
            log.warning("retrying", error=repr(error))
            return []


def encoded(name: str, fields: Any, number: str = "") -> bytes:
    """Return an event as it is sent."""
    head = f"id: {number}\n" if number else ""
    return f"{head}event: {name}\ndata: {json.dumps(fields)}\n\n".encode()


def event_routes(feed: Feed, say_run: Say) -> APIRouter:
    router, events = APIRouter(tags=["events"]), Events(feed, say_run)
    described: dict[int | str, dict[str, Any]] = {
        200: {
            "content": {"text/event-stream": {"schema": {"type": "string"}, "example": EXAMPLE}},
            "description": "server-sent events",
        }
    }

    @router.get(
        "/v1/events", operation_id="get_events", response_class=EventStream,
        responses={**described, **errors(503)},
    )  # fmt: skip
    async def stream(after: After = "", last_event_id: LastEventId = "") -> EventStream:
        """All that happens, as it happens, from an event on: nothing is left out or repeated."""
        return await events.admit(last_event_id or after)

    return router
