"""Finds the run's dead letters in the streams, and appends them to the run's log.

Letters have three sources. DG_DLQ has messages that workers cannot read, and the notices of NATS
about messages that reached the maximum number of deliveries. Events report failed attempts. The
scheduler itself refuses messages. The scheduler applies the consequences of a letter at once, and
stores the letter concurrently.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog

from services.scheduler import limits
from services.scheduler.core.inputs import MachineInput
from services.scheduler.core.state import State
from services.scheduler.shell.api_letters import RunProgress
from services.scheduler.shell.housekeeping import retry
from services.scheduler.shell.run_log import RunLog
from shared.bus.bus import Bus
from shared.bus.reader import ReceivedMessage
from shared.messages.codec import encode
from shared.messages.contracts import (
    FragmentFailed,
    FragmentSlot,
    GroupFailed,
    Message,
    PolicyPublished,
)
from shared.messages.subjects import (
    DLQ,
    EVT,
    STREAMS,
    fragment_slot,
    group_slot,
    is_unscored,
    message_subject,
)
from shared.run.log_entries import DeadLetter, LetterKind, Work
from shared.telemetry import DEAD_LETTERS, DLQ_MESSAGES

STREAM_NAMES = frozenset(stream.name for stream in STREAMS)
SEQUENCE = re.compile(r"[1-9][0-9]{0,17}\Z", re.ASCII)
UNSCORED_SLOT = re.compile(r"\.(\d{1,9})-(\d{1,9})-(\d{1,9})-(\d{1,9})\Z", re.ASCII)
MAX_DELIVERIES_REASON = "it was delivered several times and never finished"
UNDECODABLE_REASON = "its message cannot be decoded, or is of another kind"

log = structlog.get_logger()


@dataclass(slots=True)
class DeadLetters:
    """Finds the dead letters of the run."""

    _bus: Bus
    _log: RunLog
    _put: Callable[[MachineInput], None]
    num_quarantined: int = 0

    async def follow(self) -> None:
        """Follow the stream of dead letters until cancelled."""
        DEAD_LETTERS.set_function(lambda: self._log.letters.num_open)
        async for received in self._bus.follow(DLQ):
            if not received.subject.startswith("$JS") and not is_unscored(received.subject):
                self.num_quarantined += 1
                DLQ_MESSAGES.set(self.num_quarantined)
            letter = await letter_of(self._bus, received)
            if letter is None:
                continue
            failure = failure_of(letter)
            if failure is not None:
                self._put(failure)
            self._log.put(letter)

    def note(self, message: object) -> None:
        """Keep the failure of an attempt, if the message reports one."""
        if isinstance(message, FragmentFailed):
            reason = f"{message.stage}: {message.reason}"
            self._keep("failed", message, reason, _work(message.slot))
        elif isinstance(message, GroupFailed):
            work = Work(batch=message.batch, group=message.group, attempt=message.attempt)
            self._keep("failed", message, f"training: {message.reason}", work)

    def refuse(self, message: PolicyPublished, reason: str) -> None:
        """Keep a message that is not true."""
        self._keep("refused", message, reason)

    def _keep(
        self, kind: LetterKind, message: Message, reason: str, work: Work | None = None
    ) -> None:
        subject = message_subject(self._bus.run, message)
        self._log.put(make_letter(kind, EVT.name, subject, reason, encode(message), work))


def make_letter(
    kind: LetterKind, stream: str, subject: str, reason: str, data: bytes,
    work: Work | None = None, sequence: str = "",
) -> DeadLetter:  # fmt: skip
    """Return a letter.

    Args:
        sequence: number of the message in its stream, if other messages may have the same bytes.
    """
    subject = subject[: limits.MAX_SUBJECT]
    return DeadLetter(
        digest=hashlib.sha256(repr((stream, sequence, subject, data)).encode()).hexdigest(),
        kind=kind, stream=stream, subject=subject, reason=reason[: limits.MAX_REASON], work=work,
        data=base64.b64encode(data[: limits.MAX_LETTER_BYTES]).decode(),
    )  # fmt: skip


def progress_of(state: State, committed: int) -> RunProgress:
    """Return how far a run is; ``committed``: number of committed batches."""
    oldest = state.batches[0].index if state.batches else 0

    def is_given(work: Work) -> bool:
        group = state.find_group(work.batch, work.group)
        return group is not None and group.sent

    return RunProgress(max(oldest, committed), state.phase, is_given)


async def letter_of(bus: Bus, received: ReceivedMessage) -> DeadLetter | None:
    """Return the letter for a message of DG_DLQ; None if the message concerns another run."""
    headers = received.headers or {}
    copied, reason = headers.get("dg-subject", ""), headers.get("dg-reason", "")
    if is_unscored(received.subject):
        numbers = UNSCORED_SLOT.search(received.subject)
        if numbers is None:
            return None
        batch, group, first, attempt = map(int, numbers.groups())
        slot = Work(batch=batch, group=group, first_sample=first, attempt=attempt)
        reason = f"reward: {reason}"  # like the failure of the fragment's attempts
        return make_letter("unscored", DLQ.name, copied, reason, received.data, slot)
    if not received.subject.startswith("$JS"):
        stream, sequence = received.subject.split(".")[-2:]
        kind: LetterKind = "unreadable"
    else:
        try:
            advisory = json.loads(received.data)
            stream, sequence = str(advisory["stream"]), str(int(advisory["stream_seq"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        kind, reason = "undelivered", MAX_DELIVERIES_REASON
    if stream not in STREAM_NAMES or not SEQUENCE.match(sequence):
        log.error("dead_letter_of_nothing", subject=received.subject[:200])
        return None
    # Which work it is about only the stream says, and not whoever has copied the bytes.
    subject, data = await retry(partial(bus.stored_message, stream, int(sequence)))
    work = work_of(subject)
    if kind == "unreadable":
        subject, data = subject or copied, received.data
    elif not subject.startswith(f"dg.{bus.run}."):
        return None  # of another run, or forgotten with its batch
    return make_letter(kind, stream, subject, reason or UNDECODABLE_REASON, data, work, sequence)


def _work(slot: FragmentSlot) -> Work:
    return Work(**slot.model_dump(include=set(Work.model_fields)))


def work_of(subject: str) -> Work | None:
    """Return the fragment or the group of a subject."""
    if (slot := fragment_slot(subject)) is not None:
        return _work(slot)
    group = group_slot(subject)
    return None if group is None else Work(batch=group[0], group=group[1], attempt=group[2])


def failure_of(letter: DeadLetter) -> MachineInput | None:
    """Return the failure that a letter means for the run; None if none."""
    work, reason = letter.work, letter.reason
    if work is None or letter.kind == "unscored":
        return None
    if work.first_sample is None:
        return GroupFailed(batch=work.batch, group=work.group, attempt=work.attempt, reason=reason)
    slot, (kind, address) = FragmentSlot(**work.model_dump()), letter.subject.split(".")[2:4]
    if kind == "rew":  # a slot of that worker alone: its fragment has been, or will be, scored
        return None
    worker = address if kind == "traj" else None
    return FragmentFailed(slot=slot, stage="delivery", reason=reason, worker=worker)
