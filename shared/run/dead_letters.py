"""The dead letters of a run, which its log holds (log.py): the state of each.

A letter is an unusable message or failed work, with its reason. Its number is the number of its
entry. The scheduler writes letters. A run does not depend on them: repeatable work is repeated
automatically (docs/failures.md).
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

from shared.run.log_entries import DeadLetter, Entry, Settled, Settlement, Work

LetterState = Literal["open", "retried", "dropped", "over"]
"""
open       an operator may do something about it
retried    an operator has had its work done again
dropped    an operator has dropped it
over       nothing can be done: its batch is committed, its group was given to be trained, or a
           later letter is about the same work
"""
Wanted = Literal[LetterState, "all"]
"""Filter of a list of letters."""


class RunProgress(NamedTuple):
    """How far a run is, as the state of its letters depends on it."""

    committed: int
    """Number of committed batches."""
    phase: str = ""
    """Phase of the run; empty if it is not in progress."""
    is_given: Callable[[Work], bool] = lambda work: False
    """Returns True if the group of a piece of work was given to be trained."""


class LetterOutcome(NamedTuple):
    """State of a letter at a point of the run."""

    letter: DeadLetter
    state: LetterState
    text: str
    """Outcome of its work, or why a retry would change nothing; empty: a retry may help."""


@dataclass(slots=True)
class LetterOutcomes:
    """Holds all letters of a run, and computes the state of each."""

    letters: dict[int, DeadLetter] = field(default_factory=dict)
    settled: dict[int, Settlement] = field(default_factory=dict)
    _newest: dict[object, int] = field(default_factory=dict)
    """Piece of work -> number of the newest letter about it."""
    _num_read: int = 0
    """Entries of the log that were read."""

    def read(self, numbered: Sequence[Entry | None]) -> Self:
        """Read the entries of the log after those that were read before."""
        for entry in numbered[self._num_read :]:
            if isinstance(entry, DeadLetter):
                self.letters[entry.number] = entry
                if entry.work is not None:
                    self._newest[entry.work.piece] = entry.number
            elif isinstance(entry, Settled):
                for number in entry.letters:
                    if self.settled.get(number) != "dropped":
                        self.settled[number] = entry.how
        self._num_read = len(numbered)
        return self

    def newest(self, letter: DeadLetter) -> int:
        """Return the number of the newest letter about the same work."""
        return letter.number if letter.work is None else self._newest[letter.work.piece]

    def open_of_group(self, letter: DeadLetter) -> list[int]:
        """Return the numbers of the letters about a letter's group that are not settled."""
        work = letter.work
        return [
            number
            for number, each in self.letters.items()
            if work is not None and each.work is not None and number not in self.settled
            and (each.work.batch, each.work.group) == (work.batch, work.group)
        ]  # fmt: skip

    def outcome(self, letter: DeadLetter, run: RunProgress) -> LetterOutcome:
        """Return what a letter is at this point of the run."""
        stored, newest = self.settled.get(letter.number), self.newest(letter)
        if newest != letter.number:
            text = f"{'failed again: ' if stored == 'retried' else ''}see letter {newest}"
        else:
            text = _end_of(letter, stored, run)
        if text or stored is not None:
            return LetterOutcome(letter, stored or "over", text)
        if letter.kind == "failed" and run.phase == "running":
            text = "it is tried again by itself"
        elif letter.kind == "refused":
            text = "its content is not true"
        return LetterOutcome(letter, "open", text)

    def newest_first(
        self, run: RunProgress, wanted: Wanted = "all", before: int | None = None
    ) -> Iterator[LetterOutcome]:
        """Yield the letters in a state, those with numbers below ``before``."""
        for number in reversed(self.letters):
            if before is None or number < before:
                found = self.outcome(self.letters[number], run)
                if wanted in ("all", found.state):
                    yield found

    def num_open(self, run: RunProgress) -> int:
        return sum(1 for _ in self.newest_first(run, "open"))


def _end_of(letter: DeadLetter, settled: Settlement | None, run: RunProgress) -> str:
    """Return what has become of a letter's work; empty while something can be done about it."""
    work = letter.work
    if settled == "dropped":
        return "nobody needs it any more"
    if work is not None and work.batch < run.committed:
        if letter.kind == "unscored" and settled is None:
            return f"batch {work.batch} was trained without these samples"
        return f"done since: batch {work.batch} is committed"
    if settled == "retried":
        return "sent again" if work is None else "being done again"
    if work is not None and run.phase == "finished":
        return "the run is finished"
    if work is not None and run.is_given(work):
        return "its group was given to be trained, with the scores that it had then"
    return ""


def digest_of(*parts: str | bytes) -> str:
    """Return the digest of what a letter is about."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
