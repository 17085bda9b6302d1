"""The dead letters of a run: messages that nobody could use, and work that failed, each with its
reason. They are kept in the object store, so that they outlast brokers and schedulers.

    <run>/dead/<number>.json            the letter, numbered from 1 without gaps (exclusive create)
    <run>/dead/<number>.retried.json    that somebody has had its work done again
    <run>/dead/<number>.dropped.json    that somebody has seen it, and wants no more of it

The scheduler writes letters. Nothing of a run rests on them: work that can be repeated is repeated
without being asked (docs/failures.md).
"""

import asyncio
import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, cast

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
Stored = Literal["open", "retried", "dropped"]
Letters = Literal[Stored, "over"]
"""
open       somebody may do something about it
retried    somebody has had its work done again
dropped    somebody wants no more of it
over       nobody has settled it, and nothing can be done: its batch is committed, its group was
           given to be trained, or a later letter is about the same work
"""

Wanted = Literal[Letters, "all"]
"""Which letters are asked for."""
UNSETTLED: frozenset[Letters] = frozenset({"open", "over"})

MOST = 10_000
"""Letters that a run keeps; further ones are only counted."""
MAX_DATA = 64 * 1024
READ_AT_ONCE = 16
GIVEN = "its group was given to be trained, with the scores that it had then"
BY_ITSELF = "it is tried again by itself"
PREFIX = re.compile(r"(?:rollout|reward|admission|delivery|training): ")
"""Who has given up an attempt, before its reason."""
RAISED_AT = re.compile(r"\(([^()]+\.py), line (\d+)\)\Z")
"""The line of a scorer's own file at the end of a reason."""


class Work(BaseModel):
    """The piece of work that a letter is about: a fragment, or a whole group."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

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
    """sha256 of what the letter is about: whoever meets the same again has the same letter."""
    kind: Kind
    stream: str
    subject: str
    reason: str
    work: Work | None = None
    found: float
    """Seconds of the Unix clock of the scheduler that found it; nothing goes by it."""
    data: str
    """The message's bytes, in base64."""

    @property
    def bytes(self) -> bytes:
        return base64.b64decode(self.data)


class Settled(BaseModel):
    """Who has settled a letter, and when."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    by: str
    at: float
    note: str = ""


def why_not_retried(
    kind: Kind,
    work: Work | None,
    committed: int,
    *,
    is_given: bool = False,
    is_running: bool = False,
) -> str | None:
    """Return why nobody needs to retry a letter, or a retry would change nothing; None if one may.

    Args:
        work: what the letter is about.
        committed: number of committed batches.
        is_given: its group was given to somebody to train.
        is_running: the run goes on.
    """
    is_over = work is not None and work.batch < committed
    if work is not None and is_over:
        return f"batch {work.batch} is committed"
    if is_given:
        return GIVEN
    if kind == "failed" and work is not None and is_running:
        return BY_ITSELF
    return "what it says is not true" if kind == "refused" else None


def outcome_of(
    state: Letters, kind: Kind, work: Work | None, committed: int, *, is_given: bool = False
) -> str:
    """Return in words what has become of what a letter is about, if no later one is about it;
    empty while that is not known.

    Args:
        state: what somebody has done about the letter.
        work: what it is about.
        committed: number of committed batches.
        is_given: its group was given to somebody to train.
    """
    is_over = work is not None and work.batch < committed
    if kind == "unscored" and state != "retried":
        if work is not None and is_over:
            return f"batch {work.batch} was trained without these samples"
        return "" if state == "open" and not is_given else "trained without these samples"
    if work is not None and is_over:
        return f"done since: batch {work.batch} is committed"
    if state == "dropped":
        return "nobody needs it any more"
    if state == "retried":
        return "being done again" if work is not None else "sent again"
    return "its message was not used" if kind == "refused" else ""


Piece = tuple[int, int, int | None]
"""Batch, group, and first sample of a fragment."""


class Noted(NamedTuple):
    """What decides of a letter what has become of it."""

    number: int
    kind: Kind
    state: Letters
    """What somebody has done about it, or what `Fates.state` makes of that."""
    work: Work | None
    is_given: bool = False
    """Whether its group was given to somebody to train."""


@dataclass(frozen=True, slots=True)
class Fates:
    """Says what has become of letters: of those about the same work, the newest decides."""

    _same: "Mapping[Piece, Sequence[Noted]]"
    committed: int
    """Number of committed batches."""
    is_running: bool = False
    """Whether the run goes on, so that what failed is tried again by itself."""

    @classmethod
    def of(cls, letters: Iterable[Noted], committed: int, *, is_running: bool = False) -> Self:
        """Return what these letters tell, which have to be all of the run."""
        same: dict[Piece, list[Noted]] = {}
        for each in sorted(letters, key=lambda each: each.number):
            if each.work is not None:
                same.setdefault(piece_of(each.work), []).append(each)
        return cls(same, committed, is_running)

    def later(self, letter: Noted) -> list[Noted]:
        """Return the later letters about the same work, the oldest first."""
        same = [] if letter.work is None else self._same.get(piece_of(letter.work), [])
        return [each for each in same if each.number > letter.number]

    def state(self, letter: Noted) -> Letters:
        """Return whether anything can be done about a letter that nobody has settled."""
        if letter.state != "open" or letter.work is None:
            return letter.state
        is_over = letter.work.batch < self.committed or letter.is_given
        return "over" if is_over or self.later(letter) else "open"

    def why_not_retried(self, letter: Noted) -> str | None:
        """Return why nobody needs to retry a letter; None if a retry may help."""
        later = self.later(letter)
        if later:
            return f"see letter {later[-1].number}"
        return why_not_retried(
            letter.kind, letter.work, self.committed,
            is_given=letter.is_given, is_running=self.is_running,
        )  # fmt: skip

    def outcome(self, letter: Noted) -> str:
        """Return in words what has become of the work; empty while that is not known."""
        later = self.later(letter)
        decides = later[-1] if later else letter
        became = outcome_of(
            decides.state, decides.kind, decides.work, self.committed, is_given=decides.is_given
        )
        again = [each.number for each in later if _attempt(each) > _attempt(letter)]
        if again:
            became = f"failed again: {named(again)}" + (f"; {became}" if became else "")
        return became


def letters_now(
    kept: "Sequence[tuple[DeadLetter, Stored]]", committed: int
) -> "list[tuple[DeadLetter, Letters]]":
    """Return all letters of a run that is not in progress with what they are now."""
    noted = [Noted(each.number, each.kind, state, each.work) for each, state in kept]
    fates = Fates.of(noted, committed)
    return [(letter, fates.state(each)) for (letter, _), each in zip(kept, noted, strict=True)]


def named(numbers: Sequence[int]) -> str:
    """Return numbers of letters as a text names them.

    >>> named([83]), named([83, 84])
    ('letter 83', 'letters 83, 84')
    """
    return f"letter{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def cause_of(kind: Kind, reason: str) -> str:
    """Return a reason in one line without who has given up the attempt: it is the same for the
    attempt and for samples that have no score.

    >>> cause_of("failed", "reward: mine: no pixels"), cause_of("unscored", "mine: no pixels")
    ('mine: no pixels', 'mine: no pixels')
    """
    line = " ".join(reason.split())
    return PREFIX.sub("", line, count=1) if kind == "failed" and PREFIX.match(line) else line


def mend_first(reason: str) -> str:
    """Return which line of a scorer's own file is to be mended before a retry can help, and when
    that takes effect; empty if the reason names none."""
    found = RAISED_AT.search(" ".join(reason.split()))
    if found is None:
        return ""
    return (
        f"mend first what makes {found[1]} line {found[2]} fail. A change of the file itself takes "
        "effect in a new run, or, behind serve-scorer, when that is started again"
    )


def piece_of(work: Work) -> Piece:
    """Return what is the same for all attempts at a piece of work."""
    return work.batch, work.group, work.first_sample


def _attempt(letter: Noted) -> int:
    return 0 if letter.work is None else letter.work.attempt


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
    store: ObjectStore, run: str, known: "Sequence[tuple[DeadLetter, Stored]]" = ()
) -> "list[tuple[DeadLetter, Stored]]":
    """Return all letters, oldest first, each with what somebody has done about it.

    One that is damaged is left out.

    Args:
        known: what was read before: a letter never changes, and is not read again.

    Raises:
        Unavailable: if the store does not answer.
    """
    names = (await named_objects(store, run, "dead")).values()
    settled = {(int(name["number"]), cast(Stored, name["how"] or "open")) for name in names}
    letters = {letter.number: letter for letter, _ in known}
    stored = sorted(number for number, how in settled if how == "open")
    unread = [number for number in stored if number not in letters]
    for first in range(0, len(unread), READ_AT_ONCE):
        reading = (read_letter(store, run, each) for each in unread[first : first + READ_AT_ONCE])
        for letter in await asyncio.gather(*reading):
            if letter is not None:
                letters[letter.number] = letter
    return [(letters[each], state_of(each, settled)) for each in stored if each in letters]


def state_of(number: int, settled: "set[tuple[int, Stored]]") -> Stored:
    """Return what has become of a letter: what is dropped stays so."""
    if (number, "dropped") in settled:
        return "dropped"
    return "retried" if (number, "retried") in settled else "open"


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
    """Say what was done about a letter; return False if it was said before.

    Raises:
        Unavailable: if the store does not answer.
    """
    return await store.create(settlement_key(run, number, how), _json(settled))


def page(
    letters: "Iterable[tuple[DeadLetter, Letters]]",
    *,
    state: Wanted = "open",
    before: int | None = None,
    limit: int = 50,
) -> "list[tuple[DeadLetter, Letters]]":
    """Return letters in their order: those in a state, with smaller numbers than ``before``."""
    wanted = (
        each
        for each in letters
        if (state in ("all", each[1])) and (before is None or each[0].number < before)
    )
    return [each for each, _ in zip(wanted, range(limit), strict=False)]


async def read_letter(store: ObjectStore, run: str, number: int) -> DeadLetter | None:
    """Return a letter; None if there is none, or it is damaged."""
    try:
        return DeadLetter.model_validate_json(await store.read(letter_key(run, number)) or b"")
    except ValidationError:
        return None


def _json(record: BaseModel) -> bytes:
    return record.model_dump_json(exclude_none=True).encode()
