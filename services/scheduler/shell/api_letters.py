"""Dead letters as the API shows them: unusable messages, and failed work, each with its reason.

A letter's number is the number of its entry in the run's log. A run does not depend on letters:
repeatable work is repeated automatically (docs/failures.md).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

from services.scheduler.shell.api_models import View, example
from shared.run.log_entries import DeadLetter, Entry, LetterKind, Settled, Settlement, Work

LetterState = Literal["open", "retried", "dropped", "over"]
Wanted = Literal[LetterState, "all"]
"""Filter of a list of letters."""
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
    be trained, or a later letter is about the same group."""
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


class SettledView(View):
    """Result of a retry or a drop."""

    model_config = example(number=3, state="retried", note="it is being done again")

    number: int
    """Number of the letter."""
    state: LetterState
    """State of the letter afterwards."""
    note: str
    """Consequence, in words."""


class RunProgress(NamedTuple):
    """How far a run is, as the state of its letters depends on it."""

    committed: int
    """Number of committed batches."""
    phase: str = ""
    """Phase of the run; empty if it is not in progress."""
    is_given: Callable[[Work], bool] = lambda work: False
    """Returns True if the group of a piece of work was given to be trained."""


@dataclass(slots=True)
class Letters:
    """All letters of a run's log, and what operators did about them."""

    progress: Callable[[], RunProgress] = lambda: RunProgress(0)
    """Returns how far the run is."""
    letters: dict[int, DeadLetter] = field(default_factory=dict)
    settled: dict[int, Settlement] = field(default_factory=dict)
    _newest: dict[tuple[int, int], int] = field(default_factory=dict)
    """Batch and group -> number of the newest letter about the group."""
    _num_read: int = 0
    """Entries of the log that were read."""

    def read(self, numbered: Sequence[Entry | None]) -> Self:
        """Read the entries of the log after those that were read before."""
        for entry in numbered[self._num_read :]:
            if isinstance(entry, DeadLetter):
                self.letters[entry.number] = entry
                if entry.work is not None:
                    self._newest[entry.work.whole_group] = entry.number
            elif isinstance(entry, Settled):
                self.settled |= dict.fromkeys(entry.letters, entry.how)
        self._num_read = len(numbered)
        return self

    def newest(self, letter: DeadLetter) -> DeadLetter:
        """Return the newest letter about the same group."""
        work = letter.work
        return letter if work is None else self.letters[self._newest[work.whole_group]]

    def state(self, letter: DeadLetter) -> tuple[LetterState, str]:
        """Return a letter's state at this point of the run, and the outcome of its work."""
        settled, newest, work = self.settled.get(letter.number), self.newest(letter), letter.work
        run = self.progress()
        if settled == "dropped":
            return settled, "nobody needs it any more"
        if newest is not letter:
            return settled or "over", f"see letter {newest.number}"
        if work is None:
            return "open", "only failed work can be retried"
        if end := _end(work, run):
            return settled or "over", end
        if settled:
            return settled, "being done again"
        is_repeated = letter.kind == "failed" and run.phase == "running"
        return "open", "it is tried again by itself" if is_repeated else ""

    def newest_first(
        self, wanted: Wanted = "all", before: int | None = None
    ) -> Iterator[DeadLetterDetail]:
        """Yield the letters in a state, those with numbers below ``before``."""
        for number in reversed(self.letters):
            if before is None or number < before:
                letter = self.letters[number]
                if wanted == "all" or wanted == self.state(letter)[0]:
                    yield self.view(letter)

    def view(self, letter: DeadLetter) -> DeadLetterDetail:
        """Return a letter as it is at this point of the run."""
        state, outcome = self.state(letter)
        fields = letter.model_dump(exclude={"at", "digest", "event"})
        return DeadLetterDetail(
            **fields, found=letter.at, num_bytes=len(letter.bytes), state=state, outcome=outcome
        )

    @property
    def num_open(self) -> int:
        return sum(self.state(each)[0] == "open" for each in self.letters.values())


def _end(work: Work, run: RunProgress) -> str:
    """Return why nothing can be done for a piece of work any more; empty if something can."""
    if work.batch < run.committed:
        return f"batch {work.batch} is committed"
    if run.phase == "finished":
        return "the run is finished"
    return "its group was given to be trained" if run.is_given(work) else ""
