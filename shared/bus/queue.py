"""A queue of work for the workers of a service: each message goes to one worker at a time."""

import asyncio
import contextlib
import math
import time

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.errors import APIError

from shared.bus.streams import quarantine, read_message
from shared.cancellation import cancellable
from shared.errors import ContractError
from shared.limits import ACK_WAIT_S, FETCH_TIMEOUT_S, MAX_DELIVERIES, QUEUE_RETRY_S
from shared.messages import subjects
from shared.messages.contracts import Message
from shared.messages.records import Record
from shared.messages.subjects import Stream
from shared.telemetry import REDELIVERED

log = structlog.get_logger()


class Delivery:
    """One piece of work: leaving the block acknowledges it, and an exception redelivers it.

    After ``timeout_s`` the broker redelivers it as well; the first published result counts.
    """

    def __init__(self, message: Message, raw: Msg) -> None:
        self.message = message
        self.timeout_s = math.inf
        self._raw = raw
        self._alive: asyncio.Task[None] | None = None
        self._is_returned = False

    @property
    def number(self) -> int:
        """Number of deliveries of the work so far, including this one."""
        return int(self._raw.metadata.num_delivered)

    async def __aenter__(self) -> Message:
        self._alive = asyncio.create_task(self._keep_alive())
        return self.message

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._alive is not None
        self._alive.cancel()
        if self._is_returned:
            return
        # If the broker is gone, it redelivers the message, and the slot refuses the second result.
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            await (self._raw.ack() if kind is None else self._raw.nak(delay=0.1))

    async def return_to_queue(self, delay_s: float = 0.1) -> None:
        """Return work that was not begun to the queue; the broker redelivers it after the delay."""
        self._is_returned = True
        with contextlib.suppress(nats.errors.Error):
            await self._raw.nak(delay=delay_s)

    async def _keep_alive(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        while (left := deadline - time.monotonic()) > 0:
            await asyncio.sleep(min(left, ACK_WAIT_S / 3))
            with contextlib.suppress(nats.errors.Error):
                await self._raw.in_progress()
        log.warning("work_is_late", subject=self._raw.subject)
        with contextlib.suppress(nats.errors.Error):
            await self._raw.nak()  # redeliver now, without `ACK_WAIT_S`


class WorkQueue:
    """Distributes the work of one stream to all workers of a service."""

    def __init__(
        self,
        jetstream: JetStreamContext,
        run: str,
        stream: Stream,
        service: str,
        record_type: type[Record],
    ) -> None:
        self._jetstream = jetstream
        self._run = run
        self._stream = stream
        self._service = service
        self._record_type = record_type
        self._subscription: JetStreamContext.PullSubscription | None = None

    async def next(self) -> Delivery:
        """Wait for the next piece of work; reconnects after a restart of the broker."""
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
                await asyncio.sleep(QUEUE_RETRY_S)
                continue
            if raw.metadata.num_delivered > 1:
                REDELIVERED.labels(stream=self._stream.name).inc()
            try:
                message = read_message(self._run, raw)
                if not isinstance(message, self._record_type):
                    raise ContractError(
                        f"expected {self._record_type.__name__}, received {message.kind}"
                    )
                return Delivery(message, raw)
            except ContractError as error:
                await quarantine(self._jetstream, self._run, self._stream, raw, error)
                with contextlib.suppress(nats.errors.Error):  # otherwise the broker redelivers it
                    await raw.term()

    async def _subscribe(self) -> JetStreamContext.PullSubscription:
        [subject] = subjects.run_subjects(self._run, self._stream)
        subscribing = self._jetstream.pull_subscribe(
            subject,
            durable=f"{self._service}-{self._run}",
            stream=self._stream.name,
            config=api.ConsumerConfig(
                ack_policy=api.AckPolicy.EXPLICIT, ack_wait=ACK_WAIT_S, max_deliver=MAX_DELIVERIES
            ),
        )
        return await cancellable(subscribing)
