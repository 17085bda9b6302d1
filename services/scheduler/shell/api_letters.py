"""What the HTTP API says of dead letters."""

from typing import Any

from services.scheduler.shell.api_models import View, example
from shared.run.dead_letters import DeadLetter, Letters
from shared.run.dead_letters import Kind as LetterKind

A_LETTER = {
    "number": 3, "kind": "failed", "state": "open", "stream": "DG_EVT",
    "subject": "dg.digits.evt.fragment_failed", "reason": "reward: the image has no pixels",
    "work": {"batch": 12, "group": 3, "first_sample": 8, "attempt": 0}, "found": 1795447812.4,
    "num_bytes": 212, "is_given": False,
}  # fmt: skip


class WorkView(View):
    """The piece of work that a dead letter is about."""

    model_config = example(batch=12, group=3, first_sample=8, attempt=0)

    batch: int
    """Number of the batch."""
    group: int
    """Group of the batch."""
    first_sample: int | None
    """First sample of the fragment; null: the whole group."""
    attempt: int
    """Which attempt at it has failed."""


class DeadLetterView(View):
    """A message that nobody could use, or an attempt at a piece of work that failed."""

    model_config = example(**A_LETTER)

    number: int
    """Number of the letter, from 1 on."""
    kind: LetterKind
    """unreadable: bytes that are no message. undelivered: work that nobody finished. failed: an
    attempt that a worker gave up. unscored: samples without a score. refused: a message that is
    not true."""
    state: Letters
    """open: something may be done about it. retried: its work is done again. dropped: nobody cares
    for it any more. over: nobody has settled it, and nothing can be done, as its batch is
    committed, its group was given to be trained, or a later letter is about the same work."""
    stream: str
    """Stream that the message was in."""
    subject: str
    """Subject under which the message came; empty if that is not known any more."""
    reason: str
    """Why it is here."""
    work: WorkView | None
    """Work that it is about; null if none."""
    found: float
    """When it was found, in seconds of the Unix clock."""
    num_bytes: int
    """Size of the message."""
    is_given: bool
    """Whether the group was given to be trained: then what it lacks is not made any more."""


class DeadLetterDetail(DeadLetterView):
    """A dead letter with its bytes."""

    model_config = example(**A_LETTER, data="gaRraW5krw==")

    data: str
    """The message's bytes, in base64."""


class Settled(View):
    """What was done about a dead letter."""

    model_config = example(number=3, state="retried", note="it is being done again")

    number: int
    """Number of the letter."""
    state: Letters
    """What it is now."""
    note: str
    """What happens, in words."""


def letter_view(letter: DeadLetter, state: Letters, is_given: bool = False) -> DeadLetterView:
    return DeadLetterView(**_fields(letter, state), is_given=is_given)


def letter_detail(letter: DeadLetter, state: Letters, is_given: bool = False) -> DeadLetterDetail:
    return DeadLetterDetail(**_fields(letter, state), is_given=is_given, data=letter.data)


def _fields(letter: DeadLetter, state: Letters) -> dict[str, Any]:
    work = None if letter.work is None else WorkView(**letter.work.model_dump())
    stored = letter.model_dump(include={"number", "kind", "stream", "subject", "reason", "found"})
    return {**stored, "state": state, "work": work, "num_bytes": len(letter.bytes)}
