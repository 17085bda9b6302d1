"""The dead letters of a run: messages that nobody could use, and work that failed, each with its
reason. They are kept in the object store, so that they outlast brokers and schedulers.

    <run>/dead/<number>.json            the letter, numbered from 1 without gaps (exclusive create)
    <run>/dead/<number>.retried.json    an operator has had its work done again
    <run>/dead/<number>.dropped.json    an operator needs it no more

The scheduler writes letters. Nothing of a run rests on them: work that can be repeated is repeated
by itself (docs/failures.md).
"""

import asyncio
import base64
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from shared.run.layout import dead_letters_folder, named_objects
from shared.store import ObjectStore

Kind = Literal["unreadable", "undelivered", "failed", "unscored", "refused"]
"""
unreadable    bytes that are no message, or one under another's subject
undelivered   work that was delivered several times and never finished
failed        an attempt at a piece of work that a worker has given up, with its reason
unscored      samples without a score: why; their fragment counts without them
refused       a message that is not true, such as of a version that was never committed
"""
Settlement = Literal["retried", "dropped"]
LetterState = Literal["open", "retried", "dropped", "over"]
"""
open       an operator may do something about it
retried    an operator has had its work done again
dropped    an operator needs it no more
over       nothing can be done: its batch is committed, its group was given to be trained, or a
           later letter is about the same work
"""
Wanted = Literal[LetterState, "all"]
"""Which letters are asked for."""

MAX_LETTERS = 10_000
"""Letters that a run keeps; further ones are only counted."""
MAX_DATA = 64 * 1024
READ_AT_ONCE = 16


class Work(BaseModel):
    """The piece of work that a letter is about: a fragment, or a whole group."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True,
        json_schema_extra={
            "examples": [{"batch": 12, "group": 3, "first_sample": 8, "attempt": 0}]
        },
    )  # fmt: skip

    batch: int
    """Number of the batch."""
    group: int
    """Group of the batch."""
    first_sample: int | None = None
    """First sample of the fragment; null: the whole group."""
    attempt: int = 0
    """Which attempt at it has failed."""


class DeadLetter(BaseModel):
    """One letter, as it is stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int
    digest: str
    """sha256 of what the letter is about: the same failure is the same letter."""
    kind: Kind
    stream: str
    subject: str
    reason: str
    work: Work | None = None
    found: float
    """Seconds of the Unix clock of the scheduler that found it; nothing is ordered by it."""
    data: str
    """The message's bytes, in base64."""

    @property
    def bytes(self) -> bytes:
        return base64.b64decode(self.data)

    @property
    def piece(self) -> tuple[int, int, int | None] | None:
        """What is the same for all attempts at a piece of work."""
        work = self.work
        return None if work is None else (work.batch, work.group, work.first_sample)


class Settled(BaseModel):
    """Who has settled a letter, and when."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    by: str
    at: float
    note: str = ""


class RunProgress(NamedTuple):
    """How far a run is, as the state of its letters depends on it."""

    committed: int
    """Number of committed batches."""
    phase: str = ""
    """Phase of the run; empty if it is not in progress."""
    is_given: Callable[[Work], bool] = lambda work: False
    """Returns True if the group of a piece of work was given to be trained."""


class LetterOutcome(NamedTuple):
    """What a letter is now."""

    letter: DeadLetter
    state: LetterState
    text: str
    """What has become of its work, or why a retry would change nothing; empty: a retry may help."""


@dataclass(slots=True)
class LetterOutcomes:
    """Holds all letters of a run, and computes the state of each."""

    letters: dict[int, DeadLetter] = field(default_factory=dict)
    settled: dict[int, Settlement] = field(default_factory=dict)
    _newest: dict[object, int] = field(default_factory=dict)
    """Piece of work -> number of the newest letter about it."""

    def add(self, letter: DeadLetter) -> None:
        self.letters[letter.number] = letter
        if letter.work is not None:
            self._newest[letter.piece] = max(letter.number, self._newest.get(letter.piece, 0))

    def settle(self, number: int, how: Settlement) -> None:
        """Note what was done about a letter; a dropped one stays so."""
        if self.settled.get(number) != "dropped":
            self.settled[number] = how

    def newest(self, letter: DeadLetter) -> int:
        """Return the number of the newest letter about the same work."""
        return self._newest.get(letter.piece, letter.number)

    def open_of_group(self, letter: DeadLetter) -> list[int]:
        """Return the numbers of the other letters about a letter's group that nobody settled."""
        group = letter.piece and letter.piece[:2]
        return [
            number
            for number, each in self.letters.items()
            if group and each.piece and each.piece[:2] == group
            and number != letter.number and number not in self.settled
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
            text = "what it says is not true"
        return LetterOutcome(letter, "open", text)

    def newest_first(
        self, run: RunProgress, wanted: Wanted = "all", before: int | None = None
    ) -> Iterator[LetterOutcome]:
        """Yield the letters in a state, those with numbers below ``before``."""
        for number in sorted(self.letters, reverse=True):
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


def encoded(data: bytes) -> str:
    """Return bytes as a letter holds them."""
    return base64.b64encode(data[:MAX_DATA]).decode()


def digest_of(*parts: str | bytes) -> str:
    """Return the digest of what a letter is about."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def letter_key(run: str, number: int) -> str:
    return f"{dead_letters_folder(run)}/{number:08d}.json"


def settlement_key(run: str, number: int, how: Settlement) -> str:
    return f"{dead_letters_folder(run)}/{number:08d}.{how}.json"


async def read_letters(
    store: ObjectStore, run: str, known: LetterOutcomes | None = None
) -> LetterOutcomes:
    """Return all letters; damaged ones are left out.

    Args:
        known: what was read before: a letter never changes, and is not read again.

    Raises:
        Unavailable: if the store does not answer.
    """
    found = LetterOutcomes() if known is None else known
    names = (await named_objects(store, run, "dead")).values()
    unread = [int(name["number"]) for name in names if name["how"] is None]
    unread = sorted(number for number in unread if number not in found.letters)
    for first in range(0, len(unread), READ_AT_ONCE):
        reading = (read_letter(store, run, each) for each in unread[first : first + READ_AT_ONCE])
        for letter in await asyncio.gather(*reading):
            if letter is not None:
                found.add(letter)
    for name in names:
        if name["how"] is not None:
            found.settle(int(name["number"]), cast(Settlement, name["how"]))
    return found


async def add_letter(store: ObjectStore, run: str, letter: DeadLetter) -> bool:
    """Store a letter; return False if its number is taken by another one.

    Raises:
        Unavailable: if the store does not answer.
    """
    key, data = letter_key(run, letter.number), _json(letter)
    return await store.create(key, data) or await store.read(key) == data


async def settle(
    store: ObjectStore, run: str, number: int, how: Settlement, settled: Settled
) -> bool:
    """Store what was done about a letter; return False if it was stored before.

    Raises:
        Unavailable: if the store does not answer.
    """
    return await store.create(settlement_key(run, number, how), _json(settled))


async def read_letter(store: ObjectStore, run: str, number: int) -> DeadLetter | None:
    """Return a letter; None if there is none, or it is damaged."""
    try:
        return DeadLetter.model_validate_json(await store.read(letter_key(run, number)) or b"")
    except ValidationError:
        return None


def _json(record: BaseModel) -> bytes:
    return record.model_dump_json(exclude_none=True).encode()
