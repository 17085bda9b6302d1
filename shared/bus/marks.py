"""Epochs in streams: their marks, the header of commands, and slots that a refused command took."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import structlog
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError

from shared.cancellation import cancellable
from shared.limits import MAX_KEPT_MARKS
from shared.messages import subjects
from shared.messages.subjects import Stream

HEADER = "dg-epoch"
SLOT_TAKEN_CODE = 10077
"""JetStream's error code for a slot that is taken: here, a mark that is there already."""

log = structlog.get_logger()


def in_epoch(epoch: int) -> dict[str, str]:
    return {HEADER: str(epoch)}


def parse_epoch(headers: Mapping[str, Any] | None) -> int:
    """Return the epoch of a command, 0 if it has none, or none that is a number."""
    given = str((headers or {}).get(HEADER, ""))
    return int(given) if given.isascii() and given.isdigit() and len(given) < 19 else 0


async def begin_epoch(jetstream: JetStreamContext, run: str, epoch: int) -> dict[str, int]:
    """Mark an epoch in every stream of commands; return the number of each mark by stream."""
    streams = subjects.COMMANDED
    numbers = await asyncio.gather(*(_mark(jetstream, run, each, epoch) for each in streams))
    return {stream.name: number for stream, number in zip(streams, numbers, strict=True)}


async def _mark(jetstream: JetStreamContext, run: str, stream: Stream, epoch: int) -> int:
    subject = subjects.mark_subject(run, stream, epoch)
    try:
        ack = await cancellable(jetstream.publish(subject, b"", headers=in_epoch(epoch)))
        number: int = ack.seq
    except APIError as error:
        if error.err_code != SLOT_TAKEN_CODE:
            raise
        message = await cancellable(jetstream.get_last_msg(stream.name, subject))
        number = message.seq or 0
    marks = subjects.marks_in(run, stream)
    await cancellable(jetstream.purge_stream(stream.name, subject=marks, keep=MAX_KEPT_MARKS))
    return number


async def drop_fenced(
    jetstream: JetStreamContext, stored: api.RawStreamMsg, mark: int, epoch: int
) -> bool:
    """Remove a command of an older epoch that is stored behind the mark of ``epoch``: every reader
    refuses it, and it would keep its slot. Return whether it was one."""
    number = stored.seq or 0
    if number <= mark or parse_epoch(stored.headers) >= epoch:
        return False
    log.warning("slot_freed", subject=stored.subject, epoch=parse_epoch(stored.headers), now=epoch)
    stream = subjects.find_stream(stored.subject or "").name
    with contextlib.suppress(NotFoundError):  # removed by a request that timed out
        await cancellable(jetstream.delete_msg(stream, number))
    return True
