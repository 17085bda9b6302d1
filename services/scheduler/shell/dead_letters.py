"""Work that the broker gave up on, or whose bytes are no message, as events for the machine."""

import json
import re

import structlog

from services.scheduler.core.machine import MachineInput
from shared.bus.bus import Bus, Received
from shared.messages.contracts import FragmentFailed, GroupFailed
from shared.messages.subjects import STREAMS, fragment_slot, group_slot

STREAM_NAMES = frozenset(stream.name for stream in STREAMS)
SEQUENCE = re.compile(r"[1-9][0-9]{0,17}\Z", re.ASCII)

log = structlog.get_logger()


async def failure_of(bus: Bus, received: Received) -> MachineInput | None:
    """What a message of DG_DLQ says about a piece of this run's work; None if nothing."""
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
