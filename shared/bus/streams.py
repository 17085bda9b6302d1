"""Streams: how the bus makes and reads them, and how it sees that one was lost or is full."""

import asyncio
import base64
import contextlib
import json
import math
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError

from shared import limits
from shared.bus.traces import received
from shared.cancellation import cancellable
from shared.errors import ContractError, Unavailable, UserError
from shared.messages.codec import decode
from shared.messages.contracts import Message
from shared.messages.subjects import ALL_SUBJECTS, FLUID, STREAMS, Stream, message_subject
from shared.telemetry import QUARANTINED

MESSAGE_ID = "Nats-Msg-Id"
"""Names the header by which a stream knows messages of the same name."""
LAST_SENT = "Nats-Last-Consumer"
"""Header of a heartbeat with the number of messages sent to a reader."""
SERVER_ERROR = 500
"""JetStream's code, or below it, of what is the server's fault: it starts, or its disk is full."""
OTHER_SETTINGS_CODE = 10058
"""JetStream's error code for a stream that is there already, with other settings."""

STORE_FULL_CODE = (10028, 10047, 10113)
"""JetStream's error codes for more bytes than the server or the account may store."""
STORE_SETTING = "jetstream.max_file_store of the server"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StreamState:
    """The state of a stream at one time."""

    created: str
    """When it was made, as the server writes it."""
    last: int
    """Number of its newest message."""
    filled: float
    """Share of its allowed bytes that is taken; at 1 the stream is full."""

    def is_lost_in(self, later: "StreamState | None") -> bool:
        """Return whether messages may be gone: the stream is missing, new or set back."""
        return later is None or later.created != self.created or later.last < self.last


@contextlib.contextmanager
def as_unavailable() -> Iterator[None]:
    """Raises Unavailable where the server does not answer."""
    try:
        yield
    except APIError as error:
        if (error.code or 0) < SERVER_ERROR:
            raise
        raise Unavailable(f"NATS cannot do it: {error.description}") from error
    except (nats.errors.Error, OSError) as error:
        raise Unavailable(f"NATS does not answer: {error!r}") from error


async def stream_state(client: Client, stream: Stream) -> StreamState | None:
    """Return the state of a stream, None if there is no such stream.

    Raises:
        nats.errors.Error: if the server does not answer.
    """
    try:
        return _state(await _ask(client, f"STREAM.INFO.{stream.name}"))
    except NotFoundError:
        return None


async def stream_states(client: Client) -> dict[str, StreamState | None]:
    """Return the states of all streams by name, None for one that does not exist.

    Raises:
        nats.errors.Error: if the server does not answer.
        Unavailable: if it does not know the state of a stream.
    """
    answer = await _ask(client, "STREAM.LIST", subject=ALL_SUBJECTS)
    if unknown := answer.get("missing"):  # replicas that the server could not ask
        raise Unavailable(f"NATS does not report the state of {', '.join(unknown)}")
    states = {each["config"]["name"]: _state(each) for each in answer["streams"] or ()}
    return {stream.name: states.get(stream.name) for stream in STREAMS}


async def newest_message(client: Client, stream: Stream, subject: str) -> bytes:
    """Return the newest message of a subject.

    Raises:
        nats.errors.Error: if the server does not answer.
        NotFoundError: if there is no such message.
    """
    answer = await _ask(client, f"STREAM.MSG.GET.{stream.name}", last_by_subj=subject)
    return base64.b64decode(answer["message"].get("data", ""))


def _state(info: dict[str, Any]) -> StreamState:
    state, limit = info["state"], info["config"]["max_bytes"]
    return StreamState(info["created"], state["last_seq"], state["bytes"] / limit)


async def _ask(client: Client, call: str, **request: str) -> dict[str, Any]:
    """Return what JetStream answers. nats-py would make objects of hundreds of fields of it, which
    takes longer than everything else."""
    reply = client.request(
        f"$JS.API.{call}", json.dumps(request).encode(), timeout=limits.STREAM_INFO_TIMEOUT_S
    )
    answer: dict[str, Any] = json.loads((await cancellable(reply)).data)
    if "error" in answer:
        raise APIError.from_error(answer["error"])
    return answer


async def make_stream(jetstream: JetStreamContext, stream: Stream, need: int = 0) -> None:
    """Create a stream that takes ``need`` bytes, or let it grow.

    One that exists keeps its settings otherwise; but that it takes messages as large, and readers
    as many, as this release has. Its size is a multiple of what it has by default, unless an
    operator has set another; that is not changed.

    Raises:
        UserError: if it does not take so much, and why.
    """
    size = stream.max_bytes * max(1, math.ceil(need / stream.max_bytes))
    config = stream_config(replace(stream, max_bytes=size))
    try:
        await cancellable(jetstream.add_stream(config))
    except APIError as error:
        if error.err_code in STORE_FULL_CODE:
            raise _too_small(stream, need, f"NATS has no room for it ({STORE_SETTING})") from error
        if error.err_code != OTHER_SETTINGS_CODE:
            raise
        await _grow(jetstream, stream, need, config)


async def _grow(
    jetstream: JetStreamContext, stream: Stream, need: int, config: api.StreamConfig
) -> None:
    current = (await cancellable(jetstream.stream_info(stream.name))).config
    max_bytes, message = current.max_bytes or -1, current.max_msg_size or -1
    changes: dict[str, int | None] = {}
    if 0 <= max_bytes < need:
        if max_bytes % stream.max_bytes:
            change = f"nats stream edit {stream.name} --max-bytes {config.max_bytes}"
            raise _too_small(stream, need, f"an operator has given it {max_bytes} bytes ({change})")
        changes["max_bytes"] = config.max_bytes
    if 0 <= message < (config.max_msg_size or 0):  # an earlier release made it
        changes["max_msg_size"] = config.max_msg_size
    if 0 < (current.max_consumers or -1) < limits.MAX_CONSUMERS:
        changes["max_consumers"] = limits.MAX_CONSUMERS
    if not changes:
        return
    try:
        await cancellable(jetstream.update_stream(current.evolve(**changes)))
    except APIError as error:
        raise _too_small(
            stream, need, f"NATS reports: {error.description} ({STORE_SETTING})"
        ) from error
    log.info("stream_grown", stream=stream.name, **changes)


def _too_small(stream: Stream, need: int, reason: str) -> UserError:
    if stream == FLUID:
        field, smaller = "batch.groups", "choose a smaller batch"
    else:
        field = "schedule.fragment_size"
        smaller = "choose larger fragments, shorter prompts or a smaller batch.groups"
    return UserError(
        f"{field}: with this recipe the stream {stream.name} may need {need} bytes, and {reason}; "
        f"give it more room, or {smaller}"
    )


def stream_config(stream: Stream) -> api.StreamConfig:
    return api.StreamConfig(
        name=stream.name,
        subjects=list(stream.subjects),
        retention=api.RetentionPolicy.LIMITS,
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.NEW if stream.slots else api.DiscardPolicy.OLD,
        discard_new_per_subject=stream.slots,
        max_msgs_per_subject=1 if stream.slots or stream.newest else -1,
        max_bytes=stream.max_bytes,
        max_msg_size=stream.max_message_bytes + limits.MAX_HEADERS_BYTES,
        max_consumers=limits.MAX_CONSUMERS,
        duplicate_window=limits.SAME_NAME_S,
    )


def follower_config(inbox: str, filters: list[str], start: int) -> api.ConsumerConfig:
    """Configure a reader of everything from number ``start`` on; the server forgets it when it
    leaves. It has a name, so the server is called under a subject that names the stream."""
    one = filters[0] if len(filters) == 1 else None
    return api.ConsumerConfig(
        name=secrets.token_hex(8),
        deliver_subject=inbox,
        deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=start,
        filter_subject=one,
        filter_subjects=filters if one is None else None,
        ack_policy=api.AckPolicy.NONE,
        idle_heartbeat=limits.HEARTBEAT_S,
        inactive_threshold=30.0,
        mem_storage=True,
    )


@dataclass(frozen=True, slots=True)
class Incoming:
    messages: AsyncIterator[Msg]
    num_pending: int
    """Number of messages that were stored before."""


async def contiguous(arrived: asyncio.Queue[Msg]) -> AsyncIterator[Msg]:
    """Yield messages as they arrive, until one is missing or the server is silent.

    A message that went down with a connection is not sent again: behind it come others, or
    heartbeats that count it."""
    expected = 1
    while True:
        try:
            async with asyncio.timeout(3 * limits.HEARTBEAT_S):
                raw = await arrived.get()
        except TimeoutError:
            return
        if raw.headers and raw.headers.get("Status") == "100":
            if int(raw.headers.get(LAST_SENT, 0)) >= expected:
                return
            continue
        if raw.metadata.sequence.consumer != expected:
            return
        expected += 1
        yield raw


def read_message(run: str, raw: Msg) -> Message:
    """Return a message that came under its own subject.

    Raises:
        ContractError: if it is invalid, or came under another subject: rights on a subject limit
            the messages under it.
    """
    message = decode(raw.data)
    if message_subject(run, message) != raw.subject:
        raise ContractError(f"a {message.kind} came under {raw.subject}, which is not its subject")
    received(message, raw.headers)
    return message


async def bury(
    jetstream: JetStreamContext, subject: str, data: bytes, about: str, reason: str, once: str = ""
) -> None:
    """Put a message into the dead letters.

    Args:
        about: subject of the unusable message.
        once: distinguishes messages under one subject; a repeated one is dropped.
    """
    headers = {
        MESSAGE_ID: f"{subject}.{once}", "dg-subject": about,
        "dg-reason": reason[:200].encode("ascii", "replace").decode(),
    }  # fmt: skip
    with contextlib.suppress(nats.errors.Error, APIError):
        await cancellable(jetstream.publish(subject, data, headers=headers))


async def quarantine(
    jetstream: JetStreamContext, run: str, stream: Stream, raw: Msg, error: ContractError
) -> None:
    """Count the bytes that are no message, and keep a copy."""
    QUARANTINED.labels(stream=stream.name).inc()
    log.error("quarantined", stream=stream.name, subject=raw.subject, error=str(error))
    subject = f"dg.{run}.quarantine.{stream.name}.{raw.metadata.sequence.stream}"
    await bury(jetstream, subject, raw.data, raw.subject, str(error))
