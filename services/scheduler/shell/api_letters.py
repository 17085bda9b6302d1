"""Models of the HTTP API for dead letters."""

from services.scheduler.shell.api_models import View, example
from shared.run.dead_letters import LetterOutcome, LetterState
from shared.run.log_entries import LetterKind, Work

EXAMPLE_LETTER = {
    "number": 3, "kind": "failed", "state": "open", "stream": "DG_EVT",
    "subject": "dg.digits.evt.fragment_failed", "reason": "reward: the image has no pixels",
    "work": {"batch": 12, "group": 3, "first_sample": 8, "attempt": 0}, "found": 1795447812.4,
    "num_bytes": 212, "outcome": "",
}  # fmt: skip


class DeadLetterView(View):
    """An unusable message, or a failed attempt at a piece of work."""

    model_config = example(**EXAMPLE_LETTER)

    number: int
    """Number of the letter, which is the number of its entry in the run's log."""
    kind: LetterKind
    """unreadable: bytes that are no message. undelivered: unfinished work. failed: an attempt
    that a worker gave up. unscored: samples without a score. refused: a message that is
    not true."""
    state: LetterState
    """open: an operator may do something about it. retried: its work is done again. dropped: no
    longer needed. over: nothing can be done, as its batch is committed, its group was given to
    be trained, or a later letter is about the same work."""
    stream: str
    """Stream that the message was in."""
    subject: str
    """Subject under which the message came; empty if that is not known any more."""
    reason: str
    """Why it is here."""
    work: Work | None
    """Work that it is about; null if none."""
    found: float
    """When it was found, in seconds of the Unix clock."""
    num_bytes: int
    """Size of the message."""
    outcome: str
    """Outcome of its work, or why a retry would change nothing; empty: a retry may help."""


class DeadLetterDetail(DeadLetterView):
    """A dead letter with its bytes."""

    model_config = example(**EXAMPLE_LETTER, data="gaRraW5krw==")

    data: str
    """The message's bytes, in base64."""


class Settled(View):
    """Result of a retry or a drop."""

    model_config = example(number=3, state="retried", note="it is being done again")

    number: int
    """Number of the letter."""
    state: LetterState
    """State of the letter afterwards."""
    note: str
    """Consequence, in words."""


def letter_view(found: LetterOutcome) -> DeadLetterDetail:
    letter = found.letter
    return DeadLetterDetail(
        **letter.model_dump(include={"number", "kind", "stream", "subject", "reason", "data"}),
        work=letter.work, found=letter.at, state=found.state,
        num_bytes=len(letter.bytes), outcome=found.text,
    )  # fmt: skip
