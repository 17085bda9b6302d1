"""Reads streams in their order. Undecodable bytes are quarantined, and a command whose scheduler's
epoch was over when it was stored is skipped (shared/messages/epochs.py)."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.errors import APIError

from shared.bus.marks import parse_epoch
from shared.bus.streams import (
    Incoming,
    contiguous,
    follower_config,
    quarantine,
    read_message,
    stream_state,
)
from shared.cancellation import cancellable
from shared.errors import ContractError
from shared.limits import QUEUE_RETRY_S
from shared.messages import subjects
from shared.messages.contracts import Command, Message
from shared.messages.epochs import Fence
from shared.messages.subjects import Stream
from shared.telemetry import FENCED_COMMANDS

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message of a followed stream; ``message`` is None if its bytes were quarantined."""

    message: Message | None
    subject: str
    data: bytes
    headers: Mapping[str, str] | None = None


class StreamReader:
    def __init__(self, client: Client, jetstream: JetStreamContext, run: str) -> None:
        self._client = client
        self.jetstream = jetstream
        self.run = run

    async def stored(
        self, stream: Stream, filters: Sequence[str] | None = None
    ) -> tuple[list[ReceivedMessage], int]:
        """Return what the run has in ``stream``, in order, and the last one's sequence number."""
        wanted = self._wanted(stream, filters)
        while True:
            try:
                messages, last, fence = list[ReceivedMessage](), 0, Fence()
                async with self._push_consumer(stream, wanted, start=1) as incoming:
                    if not incoming.num_pending:
                        return [], 0
                    async for raw in incoming.messages:
                        last = raw.metadata.sequence.stream
                        fence, received = await self._read(stream, raw, fence)
                        messages += received
                        if not raw.metadata.num_pending:
                            return messages, last
            except (nats.errors.Error, APIError, OSError) as error:
                log.warning("read_interrupted", stream=stream.name, error=repr(error))
                await asyncio.sleep(QUEUE_RETRY_S)

    async def follow(
        self, stream: Stream, filters: Sequence[str] | None = None, *, after: int = 0
    ) -> AsyncGenerator[ReceivedMessage]:
        """Yield the run's messages in ``stream`` behind number ``after``, in order, without end.

        If the stream was lost and created again, it begins with the new stream's first message.
        """
        wanted = self._wanted(stream, filters)
        last, before, fence = after, None, Fence()
        while True:
            try:
                async with self._push_consumer(stream, wanted, start=last + 1) as incoming:
                    # Now, since until there is a reader another stream may take this one's place.
                    state = await stream_state(self._client, stream)
                    is_lost = before is not None and before.is_lost_in(state)
                    before = state
                    if is_lost:
                        last, fence = 0, Fence()
                        continue
                    async for raw in incoming.messages:
                        last = raw.metadata.sequence.stream
                        fence, received = await self._read(stream, raw, fence)
                        for each in received:
                            yield each
            except (nats.errors.Error, APIError, OSError) as error:
                log.warning("follow_interrupted", stream=stream.name, error=repr(error))
                await asyncio.sleep(QUEUE_RETRY_S)

    def _wanted(self, stream: Stream, filters: Sequence[str] | None) -> list[str]:
        """Return the subjects to read: the requested ones, and the marks of epochs."""
        if filters is None or stream not in subjects.COMMANDED:
            return list(filters or subjects.run_subjects(self.run, stream))
        return [*filters, subjects.marks_in(self.run, stream)]

    async def _read(
        self, stream: Stream, raw: Msg, fence: Fence
    ) -> tuple[Fence, tuple[ReceivedMessage, ...]]:
        """Return a message of a stream, unless it is a mark or a command whose epoch is over, and
        the fence behind it."""
        if stream not in subjects.COMMANDED:
            return fence, (await self._received(stream, raw),)
        mark = subjects.marked_epoch(raw.subject)
        if mark is not None:
            return fence.raised(mark), ()
        epoch, received = parse_epoch(raw.headers), await self._received(stream, raw)
        if isinstance(received.message, Command):
            if not fence.passes(epoch):
                FENCED_COMMANDS.labels(what=received.message.kind).inc()
                log.warning("command_refused", subject=raw.subject, epoch=epoch, now=fence.epoch)
                return fence, ()
            fence = fence.raised(epoch)
        return fence, (received,)

    async def _received(self, stream: Stream, raw: Msg) -> ReceivedMessage:
        if stream is subjects.DLQ:  # advisories, and bytes that others could not read
            return ReceivedMessage(None, raw.subject, raw.data, raw.headers)
        try:
            return ReceivedMessage(read_message(self.run, raw), raw.subject, raw.data)
        except ContractError as error:
            await quarantine(self.jetstream, self.run, stream, raw, error)
            return ReceivedMessage(None, raw.subject, raw.data)

    @contextlib.asynccontextmanager
    async def _push_consumer(
        self, stream: Stream, filters: list[str], *, start: int
    ) -> AsyncIterator["Incoming"]:
        # A subscription without a callback would make a task for each message.
        inbox, arrived = self._client.new_inbox(), asyncio.Queue[Msg](1)
        subscription = await cancellable(self._client.subscribe(inbox, cb=arrived.put))
        try:
            consumer = await cancellable(
                self.jetstream.add_consumer(stream.name, follower_config(inbox, filters, start))
            )
            try:
                yield Incoming(contiguous(arrived), consumer.num_pending or 0)
            finally:
                # An error here would take the place of a cancellation, and the reader never stop.
                with contextlib.suppress(nats.errors.Error, APIError, OSError):
                    await cancellable(self.jetstream.delete_consumer(stream.name, consumer.name))
        finally:
            with contextlib.suppress(nats.errors.Error):
                await cancellable(subscription.unsubscribe())
