"""The bus: messages through NATS JetStream; docs/adr/0005-slots.md has the reasons.

Three ways to use it:

    publish(message)        stored once per slot; a second publisher learns that the slot is
        taken
    queue(stream, service)  work shared between the workers of a service; one delivery at a time
    follow(stream)          every message of a stream in its stored order, from the first one on

Delivery is at least once and an acknowledgement proves nothing: publish the result, then
acknowledge. Undecodable bytes are copied to the quarantine, counted, and never delivered; the same
applies to a command of a scheduler whose epoch was over when it was stored
(shared/messages/epochs.py).
"""

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.errors import APIError, NotFoundError

from shared.bus.connection import check_server, open_connection
from shared.bus.marks import begin_epoch, drop_fenced, in_epoch
from shared.bus.queue import WorkQueue
from shared.bus.reader import StreamReader
from shared.bus.streams import (
    MESSAGE_ID,
    StreamState,
    as_unavailable,
    bury,
    make_stream,
    newest_message,
    read_message,
    stream_state,
    stream_states,
)
from shared.bus.traces import sent
from shared.cancellation import cancellable
from shared.errors import ContractError, SlotPoisoned, Unavailable
from shared.limits import FLUSH_TIMEOUT_S, MAX_HANDLING_S, PUBLISH_TIMEOUT_S, QUEUE_RETRY_S
from shared.messages import subjects
from shared.messages.codec import decode, encode
from shared.messages.contracts import Command, FragmentGenerated, GenerateFragment, Message
from shared.messages.records import Record
from shared.messages.subjects import Stream, message_subject
from shared.messages.workers import Transient, WorkerRefused, WorkerStatus
from shared.telemetry import STREAM_FULL, public

STORE_FAILED = 10077
"""JetStream's error code for a taken slot, and for a full stream; the text distinguishes them."""

TransientT = TypeVar("TransientT", WorkerStatus, WorkerRefused)

log = structlog.get_logger()


class Bus(StreamReader):
    def __init__(self, client: Client, run: str) -> None:
        super().__init__(client, client.jetstream(timeout=PUBLISH_TIMEOUT_S), run)
        self.full: dict[str, str] = {}
        """Stream of each subject whose message waits for room."""
        self._waiting: dict[object, tuple[str, float]] = {}
        """Subject of each message that is being stored, and since when."""
        self.epoch = 0
        """Epoch of the commands that this bus publishes; 0 for none."""
        self._marks: dict[str, int] = {}
        """Number of the mark of that epoch, by stream."""

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls,
        url: str,
        *,
        run: str,
        name: str,
        trusted: ssl.SSLContext | None = None,
        may_be_open: bool = False,
    ) -> AsyncIterator["Bus"]:
        """Connect, and reconnect for as long as the block lasts.

        Args:
            trusted: certificate check of the server, if it has a certificate.
            may_be_open: whether a server without authentication is allowed.

        Raises:
            Unavailable: if the server does not respond within seconds.
            UserError: if the server refuses the user or the password, is too old, has no
                JetStream, or has no authentication.
        """
        client = await open_connection(url, name, trusted)
        try:
            check_server(client, public(url), may_be_open=may_be_open)
            yield cls(client, run)
        finally:
            # Sends what is buffered. Draining would wait for messages that nobody handles any more.
            with contextlib.suppress(nats.errors.Error, TimeoutError):
                if client.is_connected:
                    await client.flush(FLUSH_TIMEOUT_S)
            with contextlib.suppress(OSError):  # it was reset, and has something left to send
                await client.close()

    async def ensure_streams(self, needs: Mapping[str, int] | None = None) -> None:
        """Create the streams that are missing; only the scheduler does. A stream to which an
        operator has given another size keeps it.

        Args:
            needs: bytes that a stream must take, by its name.

        Raises:
            Unavailable: if the server does not answer.
            UserError: if a stream does not take what it must.
        """
        with as_unavailable():
            for stream in subjects.STREAMS:
                await make_stream(self.jetstream, stream, (needs or {}).get(stream.name, 0))

    async def stream_states(self) -> dict[str, StreamState | None]:
        """Return the state of every stream by name, None for one that does not exist.

        Raises:
            Unavailable: if the server does not answer.
        """
        with as_unavailable():
            return await stream_states(self._client)

    async def check(self) -> None:
        """Ask what every role may ask.

        Raises:
            Unavailable: if the server does not answer.
        """
        with as_unavailable():
            await stream_state(self._client, subjects.STREAMS[0])

    async def wait_for_streams(self) -> None:
        """Return when the scheduler has created all streams, of which it creates one after the
        other."""
        while True:
            with contextlib.suppress(nats.errors.Error):
                if await stream_state(self._client, subjects.STREAMS[-1]) is not None:
                    return
            await asyncio.sleep(QUEUE_RETRY_S)

    async def begin_epoch(self, epoch: int) -> None:
        """Mark a new epoch in every stream of commands: commands of older epochs are refused from
        here on, and commands published from now on carry the new one.

        Raises:
            Unavailable: if the server does not answer.
        """
        with as_unavailable():
            self._marks = await begin_epoch(self.jetstream, self.run, epoch)
        self.epoch = epoch

    async def publish(self, message: Message, *, once: str | None = None) -> bool:
        """Store ``message``; return False if its slot is taken already.

        ``once``: names an event that many may report at about the same time: of messages with the
        same name the broker keeps one within `SAME_NAME_S`, and drops the others.

        A publish that times out may have been stored all the same, so it is repeated until the
        broker answers: a slot makes the repetition harmless, and readers expect events without a
        slot to come twice.

        It waits while the stream is full, until the scheduler forgets old batches or an operator
        makes room.

        Raises:
            SlotPoisoned: if the slot holds bytes that are no message.
        """
        subject, data = message_subject(self.run, message), encode(message)
        in_force = in_epoch(self.epoch) if isinstance(message, Command) and self.epoch else None
        headers = sent(message, in_force)
        if once is not None:
            headers = {**(headers or {}), MESSAGE_ID: f"{self.run}.{once}"}
        publication = object()
        self._waiting[publication] = subject, time.monotonic()
        try:
            return await self._published(subject, data, headers)
        finally:
            del self._waiting[publication]

    @property
    def seconds_unstored(self) -> float:
        """Seconds for which a message has waited to be stored by now, unless its stream is full."""
        since = [began for subject, began in self._waiting.values() if subject not in self.full]
        return time.monotonic() - min(since) if since else 0.0

    async def _published(self, subject: str, data: bytes, headers: dict[str, str] | None) -> bool:
        while True:
            try:
                with as_unavailable():
                    is_first = await self._store(subject, data, headers)
                if is_first is not None:
                    self.full.pop(subject, None)
                    return is_first
            except Unavailable as error:
                log.warning("publish_repeated", subject=subject, error=str(error))
            await asyncio.sleep(QUEUE_RETRY_S)

    async def _store(
        self, subject: str, data: bytes, headers: dict[str, str] | None
    ) -> bool | None:
        """Return whether the message is the first in its slot, None if it is to be repeated."""
        try:
            stored = await cancellable(self.jetstream.publish(subject, data, headers=headers))
            return not stored.duplicate
        except APIError as error:
            if error.err_code != STORE_FAILED:
                raise
            if "per subject" in (error.description or ""):
                return None if await self._check_slot(subject) else False
            self._note_full(subject)
            return None

    def _note_full(self, subject: str) -> None:
        stream = subjects.find_stream(subject).name
        STREAM_FULL.labels(stream=stream).inc()
        if subject not in self.full:
            log.error("stream_full", stream=stream, subject=subject)
        self.full[subject] = stream

    async def bury_samples(
        self, event: FragmentGenerated, scorer: str, reasons: Mapping[int, str]
    ) -> None:
        """Put into the dead letters why samples of a fragment have no score; sample -> reason."""
        subject = subjects.unscored_subject(self.run, event.fragment.slot)
        first = next(iter(reasons.values()))
        data = json.dumps({"scorer": scorer, "samples": reasons}).encode()
        about = message_subject(self.run, event)
        await bury(self.jetstream, subject, data, about, f"{scorer}: {first}", scorer)

    async def send(self, message: Transient) -> None:
        """Publish ``message`` without storing it: it is lost while the broker is away."""
        with contextlib.suppress(nats.errors.Error):
            await cancellable(
                self._client.publish(message_subject(self.run, message), encode(message))
            )

    async def on_status(
        self, handle: Callable[[WorkerStatus], Awaitable[None]]
    ) -> Callable[[], int]:
        """Handle statuses of workers as they arrive; returns a function that counts the waiting
        ones."""
        subscribed = await self._subscribe(f"dg.{self.run}.live.>", WorkerStatus, handle)
        return lambda: int(subscribed.pending_msgs)

    async def on_refusal(
        self, address: str, handle: Callable[[WorkerRefused], Awaitable[None]]
    ) -> None:
        await self._subscribe(subjects.refusals_for(self.run, address), WorkerRefused, handle)

    async def _subscribe(
        self, subject: str, kind: type[TransientT], handle: Callable[[TransientT], Awaitable[None]]
    ) -> Subscription:
        turn_began = time.thread_time()

        async def receive(raw: Msg) -> None:
            nonlocal turn_began
            # The client hands over all that has come without giving anybody else a turn.
            if time.thread_time() > turn_began + MAX_HANDLING_S:
                await asyncio.sleep(0)
                turn_began = time.thread_time()
            with contextlib.suppress(ContractError):
                message = read_message(self.run, raw)
                if isinstance(message, kind):
                    await handle(message)

        return await cancellable(self._client.subscribe(subject, cb=receive))

    def queue(self, stream: Stream, service: str, kind: type[Record] = Record) -> WorkQueue:
        """Return the work in ``stream`` for a service; messages not of type ``kind`` are
        quarantined."""
        return WorkQueue(self.jetstream, self.run, stream, service, kind)

    async def task_of(self, event: FragmentGenerated) -> GenerateFragment | None:
        """Return the task by which a worker has generated a fragment, as the scheduler gave it;
        None if it gave that worker none.

        Raises:
            Unavailable: if the server does not answer.
        """
        subject = subjects.task_subject(self.run, event.worker, event.fragment)
        with as_unavailable(), contextlib.suppress(NotFoundError, ContractError):
            task = decode(await newest_message(self._client, subjects.TASK, subject))
            if isinstance(task, GenerateFragment) and task.fragment == event.fragment:
                return task
        return None

    async def stored_message(self, stream: str, sequence: int) -> tuple[str, bytes]:
        """Return subject and bytes of one stored message, both empty if it is gone.

        Raises:
            Unavailable: if the server does not answer.
        """
        with as_unavailable(), contextlib.suppress(NotFoundError):
            message = await cancellable(self.jetstream.get_msg(stream, sequence))
            return message.subject or "", message.data or b""
        return "", b""

    async def forget_batch(self, batch: int) -> None:
        """Remove the slots of a batch that no recovery needs any more.

        Raises:
            Unavailable: if the server does not answer.
        """
        for stream in subjects.STREAMS:
            if stream.slots:
                subject = subjects.batch_subject(self.run, stream, batch)
                with as_unavailable(), contextlib.suppress(NotFoundError):  # a stream that is gone
                    purge = self.jetstream.purge_stream(stream.name, subject=subject)
                    await cancellable(purge)

    async def _check_slot(self, subject: str) -> bool:
        """Return whether the slot was taken by a command that every reader refuses; it is free
        now."""
        stream = subjects.find_stream(subject)
        with contextlib.suppress(NotFoundError):  # purged meanwhile: nobody needs it any more
            stored = await cancellable(self.jetstream.get_last_msg(stream.name, subject))
            mark = self._marks.get(stream.name)
            if mark is not None and await drop_fenced(self.jetstream, stored, mark, self.epoch):
                return True
            try:
                decode(stored.data or b"")
            except ContractError as error:
                raise SlotPoisoned(f"{subject} is taken by bytes that are no message") from error
        return False
