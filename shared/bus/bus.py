"""The bus: NATS JetStream as reliability notes found it to work (docs/adr/0005-slots.md).

Three ways to use it:

    publish(message)        stored once per slot; a second publisher is told that the slot is taken
    queue(stream, service)  work shared between the workers of a service; one delivery at a time
    follow(stream)          every message of a stream in its stored order, from the first one on

Delivery is at least once and an acknowledgement proves nothing: publish the result, then
acknowledge. What cannot be decoded is copied to the quarantine, counted, and never delivered.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError

from shared.bus.cancellation import cancellable
from shared.bus.connection import open_connection
from shared.bus.streams import (
    Incoming,
    StreamMark,
    answering,
    contiguous,
    follower_config,
    make_stream,
    stream_mark,
)
from shared.errors import ContractError, SlotPoisoned, Unavailable
from shared.messages import subjects
from shared.messages.codec import decode, encode
from shared.messages.contracts import Message
from shared.messages.records import Record
from shared.messages.subjects import Stream, subject_of
from shared.messages.workers import Told, WorkerRefused, WorkerStatus
from shared.telemetry import QUARANTINED, REDELIVERED, STREAM_FULL

MIN_SERVER = (2, 11)
ACK_WAIT_S = 10.0
MAX_DELIVER = 5
PUBLISH_TIMEOUT_S = 5.0
FETCH_TIMEOUT_S = 2.0
FLUSH_S = 3
RETRY_S = 0.5
STORE_FAILED = 10077
"""JetStream's error code for a taken slot, and for a full stream; the text tells them apart."""

ToldT = TypeVar("ToldT", WorkerStatus, WorkerRefused)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a followed stream. ``message`` is None if its bytes were quarantined."""

    message: Message | None
    subject: str
    data: bytes


class Delivery:
    """A piece of work. Leaving the block acknowledges it; an exception hands it to others, and so
    does ``patience_s`` without either: whoever is first to publish its result has done it."""

    def __init__(self, message: Message, raw: Msg) -> None:
        self.message = message
        self.patience_s = math.inf
        self._raw = raw
        self._alive: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Message:
        self._alive = asyncio.create_task(self._keep_alive())
        return self.message

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._alive is not None
        self._alive.cancel()
        # The broker may be gone: the message is then delivered again, and its slot is taken.
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            await (self._raw.ack() if kind is None else self._raw.nak(delay=0.1))

    async def _keep_alive(self) -> None:
        deadline = time.monotonic() + self.patience_s
        while time.monotonic() < deadline:
            await asyncio.sleep(ACK_WAIT_S / 3)
            with contextlib.suppress(nats.errors.Error):
                await self._raw.in_progress()
        log.warning("work_is_late", subject=self._raw.subject)


class Queue:
    """Work shared by all workers of a service."""

    def __init__(self, bus: "Bus", stream: Stream, durable: str, of: type[Record]) -> None:
        self._of = of
        self._bus = bus
        self._stream = stream
        self._durable = durable
        self._subscription: JetStreamContext.PullSubscription | None = None

    async def next(self) -> Delivery:
        """Wait for the next piece of work, over broker restarts."""
        while True:
            try:
                if self._subscription is None:
                    self._subscription = await self._subscribe()
                [raw] = await cancellable(self._subscription.fetch(1, timeout=FETCH_TIMEOUT_S))
            except nats.errors.TimeoutError:
                continue
            except (nats.errors.Error, APIError, OSError) as error:
                log.warning("queue_unavailable", stream=self._stream.name, error=repr(error))
                self._subscription = None
                await asyncio.sleep(RETRY_S)
                continue
            if raw.metadata.num_delivered > 1:
                REDELIVERED.labels(stream=self._stream.name).inc()
            try:
                message = decode(raw.data)
                if not isinstance(message, self._of):
                    raise ContractError(f"a {message.kind} is no {self._of.__name__}")
                return Delivery(message, raw)
            except ContractError as error:
                await self._bus.quarantine(self._stream, raw, error)
                await raw.term()

    async def _subscribe(self) -> JetStreamContext.PullSubscription:
        [subject] = subjects.run_subjects(self._bus.run, self._stream)
        subscribing = self._bus.jetstream.pull_subscribe(
            subject,
            durable=f"{self._durable}-{self._bus.run}",
            stream=self._stream.name,
            config=api.ConsumerConfig(
                ack_policy=api.AckPolicy.EXPLICIT, ack_wait=ACK_WAIT_S, max_deliver=MAX_DELIVER
            ),
        )
        return await cancellable(subscribing)


class Bus:
    def __init__(self, client: Client, run: str) -> None:
        self._client = client
        self.run = run
        self.jetstream = client.jetstream(timeout=PUBLISH_TIMEOUT_S)
        self.full: dict[str, str] = {}
        """Subjects whose message waits for room, and their streams."""

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, url: str, *, run: str, name: str) -> AsyncIterator["Bus"]:
        """Connect, and reconnect for as long as the block lasts.

        Raises:
            Unavailable: if nobody answers within some seconds, or the server is too old.
            UserError: if the server refuses the user or the password.
        """
        client = await open_connection(url, name)
        try:
            version = client.connected_server_version
            if (version.major, version.minor) < MIN_SERVER:
                raise Unavailable(
                    f"NATS server {version} is too old; DigenRL needs "
                    f"{'.'.join(str(part) for part in MIN_SERVER)} or newer"
                )
            yield cls(client, run)
        finally:
            # What was told is sent. Draining would wait for messages that nobody handles any more.
            with contextlib.suppress(nats.errors.Error, TimeoutError):
                if client.is_connected:
                    await client.flush(FLUSH_S)
            await client.close()

    @property
    def connected(self) -> bool:
        return bool(self._client.is_connected)

    async def ensure_streams(self) -> None:
        """Create the streams that are missing. The scheduler's task alone. One that an operator has
        given another size keeps it.

        Raises:
            Unavailable: if the server does not answer.
        """
        with answering():
            for stream in subjects.STREAMS:
                await make_stream(self.jetstream, stream)

    async def marks(self) -> dict[str, StreamMark | None]:
        """Of every stream, by name; None of one that is not there.

        Raises:
            Unavailable: if the server does not answer.
        """
        with answering():
            marks = (stream_mark(self.jetstream, stream) for stream in subjects.STREAMS)
            found = await asyncio.gather(*marks)
        return {stream.name: mark for stream, mark in zip(subjects.STREAMS, found, strict=True)}

    async def wait_for_streams(self) -> None:
        """Until the scheduler has created them."""
        for stream in subjects.STREAMS:
            while True:
                try:
                    await cancellable(self.jetstream.stream_info(stream.name))
                    break
                except (NotFoundError, nats.errors.Error):
                    await asyncio.sleep(RETRY_S)

    async def publish(self, message: Message) -> bool:
        """Store ``message``; False if it has a slot and that slot is taken already.

        A publish that times out may have been stored all the same, so it is repeated until the
        broker gives an answer: a slot makes the repetition harmless, and the events without one
        are read as if they were told twice.

        Where the stream is full it waits for room, which the scheduler makes by forgetting old
        batches, or an operator.

        Raises:
            SlotPoisoned: if what has taken the slot is no message.
        """
        subject, data = subject_of(self.run, message), encode(message)
        while True:
            try:
                with answering():
                    is_first = await self._store(subject, data)
                if is_first is not None:
                    self.full.pop(subject, None)
                    return is_first
            except Unavailable as error:
                log.warning("publish_repeated", subject=subject, error=str(error))
            await asyncio.sleep(RETRY_S)

    async def _store(self, subject: str, data: bytes) -> bool | None:
        """Whether it is the first one in its slot; None if there is no room for it."""
        try:
            await cancellable(self.jetstream.publish(subject, data))
            return True
        except APIError as error:
            if error.err_code != STORE_FAILED:
                raise
            if "per subject" in (error.description or ""):
                await self._check_slot(subject)
                return False
            self._note_full(subject)
            return None

    def _note_full(self, subject: str) -> None:
        stream = subjects.stream_of(subject).name
        STREAM_FULL.labels(stream=stream).inc()
        if subject not in self.full:
            log.error("stream_full", stream=stream, subject=subject)
        self.full[subject] = stream

    async def tell(self, message: Told) -> None:
        """Publish without storing it; lost while the broker is away."""
        with contextlib.suppress(nats.errors.Error):
            await self._client.publish(subject_of(self.run, message), encode(message))

    async def on_status(self, handle: Callable[[WorkerStatus], Awaitable[None]]) -> None:
        await self._hear(f"dg.{self.run}.live.>", WorkerStatus, handle)

    async def on_refusal(
        self, address: str, handle: Callable[[WorkerRefused], Awaitable[None]]
    ) -> None:
        await self._hear(subjects.refusals_for(self.run, address), WorkerRefused, handle)

    async def _hear(
        self, subject: str, kind: type[ToldT], handle: Callable[[ToldT], Awaitable[None]]
    ) -> None:
        async def receive(raw: Msg) -> None:
            with contextlib.suppress(ContractError):
                message = decode(raw.data)
                if isinstance(message, kind):
                    await handle(message)

        await self._client.subscribe(subject, cb=receive)

    def queue(self, stream: Stream, service: str, of: type[Record] = Record) -> Queue:
        """``of``: what is work for that service; other messages are quarantined."""
        return Queue(self, stream, service, of)

    async def stored(self, stream: Stream) -> tuple[list[Received], int]:
        """What this run has in ``stream`` now, in order, and the sequence number of the last."""
        wanted = subjects.run_subjects(self.run, stream)
        while True:
            try:
                found, last = [], 0
                async with self._push_consumer(stream, wanted, start=1) as incoming:
                    if not incoming.num_pending:
                        return [], 0
                    async for raw in incoming.messages:
                        last = raw.metadata.sequence.stream
                        found.append(await self._received(stream, raw))
                        if not raw.metadata.num_pending:
                            return found, last
            except (nats.errors.Error, APIError, OSError) as error:
                log.warning("read_interrupted", stream=stream.name, error=repr(error))
                await asyncio.sleep(RETRY_S)

    async def follow(
        self, stream: Stream, filters: Sequence[str] | None = None, *, after: int = 0
    ) -> AsyncGenerator[Received]:
        """Every message of this run in ``stream`` behind number ``after``, in order, for ever; all
        of them anew if the stream was lost and made again."""
        wanted = list(filters or subjects.run_subjects(self.run, stream))
        last, before = after, None
        while True:
            try:
                mark = await stream_mark(self.jetstream, stream)
                if mark is not None:
                    if before is not None and before.is_lost_in(mark):
                        last = 0
                    before = mark
                async with self._push_consumer(stream, wanted, start=last + 1) as incoming:
                    async for raw in incoming.messages:
                        last = raw.metadata.sequence.stream
                        yield await self._received(stream, raw)
            except (nats.errors.Error, APIError, OSError) as error:
                log.warning("follow_interrupted", stream=stream.name, error=repr(error))
                await asyncio.sleep(RETRY_S)

    async def quarantine(self, stream: Stream, raw: Msg, error: ContractError) -> None:
        """Keep the bytes that are no message, count them, and go on."""
        QUARANTINED.labels(stream=stream.name).inc()
        sequence = raw.metadata.sequence.stream
        log.error("quarantined", stream=stream.name, subject=raw.subject, error=str(error))
        with contextlib.suppress(nats.errors.Error, APIError):
            await self.jetstream.publish(
                f"dg.{self.run}.quarantine.{stream.name}.{sequence}",
                raw.data,
                headers={
                    "Nats-Msg-Id": f"{self.run}.{stream.name}.{sequence}",
                    "dg-subject": raw.subject,
                    "dg-reason": str(error)[:200],
                },
            )

    async def stored_subject(self, stream: str, sequence: int) -> str | None:
        """The subject of one stored message; None if it is gone."""
        try:
            found: str | None = (
                await cancellable(self.jetstream.get_msg(stream, sequence))
            ).subject
        except NotFoundError:
            return None
        return found

    async def forget_batch(self, batch: int) -> None:
        """Remove the slots of a batch that no recovery needs any more.

        Raises:
            Unavailable: if the server does not answer.
        """
        for stream in subjects.STREAMS:
            if stream.slots:
                subject = subjects.batch_subject(self.run, stream, batch)
                with answering(), contextlib.suppress(NotFoundError):  # gone with its stream
                    purge = self.jetstream.purge_stream(stream.name, subject=subject)
                    await cancellable(purge)

    async def _check_slot(self, subject: str) -> None:
        stream = subjects.stream_of(subject)
        with contextlib.suppress(NotFoundError):  # purged meanwhile: nobody needs it any more
            stored = await cancellable(self.jetstream.get_last_msg(stream.name, subject))
            try:
                decode(stored.data or b"")
            except ContractError as error:
                raise SlotPoisoned(f"{subject} is taken by bytes that are no message") from error

    async def _received(self, stream: Stream, raw: Msg) -> Received:
        if stream is subjects.DLQ:  # its bytes are advisories and what others could not read
            return Received(None, raw.subject, raw.data)
        try:
            return Received(decode(raw.data), raw.subject, raw.data)
        except ContractError as error:
            await self.quarantine(stream, raw, error)
            return Received(None, raw.subject, raw.data)

    @contextlib.asynccontextmanager
    async def _push_consumer(
        self, stream: Stream, filters: list[str], *, start: int
    ) -> AsyncIterator["Incoming"]:
        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe(inbox)
        try:
            consumer = await cancellable(
                self.jetstream.add_consumer(stream.name, follower_config(inbox, filters, start))
            )
            try:
                yield Incoming(contiguous(subscription), consumer.num_pending or 0)
            finally:
                # An error here would take the place of a cancellation, and the reader never stop.
                with contextlib.suppress(nats.errors.Error, APIError, OSError):
                    await cancellable(self.jetstream.delete_consumer(stream.name, consumer.name))
        finally:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()
