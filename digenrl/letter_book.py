"""What the dead letters of a run say to people, and what has become of each."""

import base64
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from digenrl.dead_letters import Desk, Letter, Now
from digenrl.reading.wording import KINDS, step_of
from shared.errors import ContractError
from shared.messages.codec import decode
from shared.run.dead_letters import BY_ITSELF, Fates, Noted, Wanted, Work, cause_of, mend_first

FIRST_LINE = 160
STILL_FAILS_S = 60.0
"""Seconds after the newest letter from which what failed seems to be mended."""
SHOWN_IN_WORDS = frozenset({"data", "stream", "subject", "num_bytes", "is_given"})
"""Fields of a letter that only programs ask for, if it says what its work is."""


@dataclass(frozen=True, slots=True)
class Book:
    """Has all letters of a run, and says what has become of them."""

    run: str
    letters: Sequence[Letter]
    """The newest first."""
    now: Now | None
    """Where the run is; None if it is not in progress."""
    fates: Fates

    @classmethod
    def of(cls, run: str, letters: Sequence[Letter], now: Now | None) -> "Book":
        committed = 0 if now is None else now.committed
        is_running = now is not None and now.phase == "running"
        fates = Fates.of(map(_noted, letters), committed, is_running=is_running)
        return cls(run, letters, now, fates)

    @classmethod
    def read(cls, desk: Desk, run: str, first: int = 1) -> "Book":
        return cls.of(run, desk.every(first), desk.now())

    def chosen(self, state: Wanted, before: int | None = None, reason: str = "") -> list[Letter]:
        """Return the letters in a state whose reason contains a text, whatever its case."""
        return [
            each
            for each in self.letters
            if state in ("all", each["state"])
            and (before is None or each["number"] < before)
            and reason.lower() in plain_cause(each).lower()
        ]

    def outcome(self, letter: Letter) -> str:
        """Return in words what has become of what a letter is about; empty if not known."""
        return self.fates.outcome(_noted(letter))

    def later(self, letter: Letter) -> list[Noted]:
        """Return the later letters about the same work, the oldest first."""
        return self.fates.later(_noted(letter))

    def why_not_retried(self, letter: Letter) -> str | None:
        """Return why nobody needs to retry a letter; None if a retry may help."""
        return self.fates.why_not_retried(_noted(letter))

    def mends(self) -> list[str]:
        """Return what is to be mended before the work of open letters is done again."""
        opened = (each for each in self.chosen("open") if self._may_be_done(each))
        return [*dict.fromkeys(filter(None, (mend_first(each["reason"]) for each in opened)))]

    def is_known(self, letter: Letter) -> bool:
        """Return whether it is known what has become of the work of a letter that was retried."""
        work = letter["work"]
        is_over = work is None or (self.now is not None and work["batch"] < self.now.committed)
        return is_over or bool(self.later(letter))

    def helped(self, letters: Sequence[Letter]) -> list[int]:
        """Return the numbers of the open ones for which a retry may change something."""
        if self.now is None:
            return []
        return [
            each["number"]
            for each in letters
            if each["state"] == "open" and self.why_not_retried(each) is None
        ]

    def settle(self, desk: Desk, number: int, action: Literal["retry", "drop"]) -> str:
        """Settle a letter; return what happens, in words.

        Raises:
            UserError: if there is no such letter, or nothing would follow.
        """
        letter = next((each for each in self.letters if each["number"] == number), None)
        if action == "drop" or letter is None:
            return desk.settle(number, action)
        later = self.later(letter)
        if letter["state"] == "retried" and not later:
            return f"letter {number} was retried before"
        if later:  # the newest says whether anything can be done
            return self.settle(desk, later[-1].number, action)
        return desk.settle(number, action)

    def retried(self) -> list[Letter]:
        """Return the retried letters, of each piece of work the newest."""
        return [each for each in self.chosen("retried") if not self.later(each)]

    def newest(self, number: int) -> int:
        """Return the newest letter about the work of a letter."""
        letter = next((each for each in self.letters if each["number"] == number), None)
        later = [] if letter is None else self.later(letter)
        return later[-1].number if later else number

    def lines(self, letters: Sequence[Letter]) -> list[str]:
        """Return a line for each letter."""
        return [self._line(each) for each in letters]

    def _line(self, letter: Letter) -> str:
        why = self.why_not_retried(letter) or ""
        is_older = letter["state"] == "open" and why.startswith("see ")
        return line_of(letter, why if is_older else self.outcome(letter))

    def reasons(self, letters: Sequence[Letter]) -> list[str]:
        """Return a line for each reason, the most frequent first: how many letters have it, and the
        newest of them."""
        grouped: dict[str, list[Letter]] = {}
        for each in letters:
            grouped.setdefault(plain_cause(each), []).append(each)
        return [
            f"{len(those):6d}  newest {those[0]['number']}: {cause[:FIRST_LINE]}"
            for cause, those in sorted(grouped.items(), key=lambda item: -len(item[1]))
        ]

    def hints(self) -> list[str]:
        """Return lines that say what may be done about what fails, in its order with the command
        for each step; none if the run is not in progress, or has no letters."""
        opened, over = self.chosen("open"), self.chosen("over")
        if self.now is None or not (opened or over):
            return []
        steps, first = self._steps(opened, over), self.mends()
        if self.now.phase == "paused":  # the mend is the next thing to do
            steps, first = [*first, *steps], []
        return [*steps, self._counts(len(opened), len(over), may_come=len(steps) > 1), *first]

    def _may_be_done(self, letter: Letter) -> bool:
        """Return whether the work of a letter is done again, by a retry or by itself."""
        return self.why_not_retried(letter) in (None, BY_ITSELF)

    def _steps(self, opened: Sequence[Letter], over: Sequence[Letter]) -> list[str]:
        assert self.now is not None
        retry = f"`digenrl dlq retry {self.run} --all"
        catch = f"`digenrl pause {self.run} --at-failure`"
        useful, phase = self.helped(opened), self.now.phase
        if opened and not any(map(self._may_be_done, opened)):
            return [f"a retry helps none of the open letters: `digenrl dlq drop {self.run} --all`"]
        if phase == "paused" and useful:
            return [f"once it is mended: {retry} --resume`"]
        if phase == "paused":
            return [
                f"nothing of the open batch has failed; to catch what fails next: {catch}, then "
                f"`digenrl resume {self.run}`"
            ]
        newest = max(each["found"] for each in (*opened, *over))
        if phase == "running" and (opened or time.time() - newest < STILL_FAILS_S):
            return [
                "to have what fails done after all:",
                f"  1. {catch} waits until something fails, and pauses the run",
                "  2. mend it",
                f"  3. {retry} --resume`",
            ]
        return [f"once it is mended: {retry}`"] if useful else []

    def _counts(self, opened: int, over: int, *, may_come: bool) -> str:
        none = "none is open now" if may_come else "none is open, so nothing can be done again"
        are = "is" if opened == 1 else "are"
        said = f"{opened} {are} open" if opened else none
        if not over:
            return said
        are = "is" if over == 1 else "are"
        return f"{said}; {over} {are} over: done or trained without, or a later one tells of it"


def _noted(letter: Letter) -> Noted:
    work = None if letter["work"] is None else Work.model_validate(letter["work"])
    return Noted(letter["number"], letter["kind"], letter["state"], work, letter["is_given"])


def plain_cause(letter: Letter) -> str:
    """Return the reason of a letter without who has given up the attempt."""
    return cause_of(letter["kind"], letter["reason"])


def every_open(book: Book) -> list[int]:
    """Return the numbers of all open letters, newest first."""
    return [each["number"] for each in book.chosen("open")]


def line_of(letter: Letter, became: str = "") -> str:
    """Return a letter as one line of a table, with what has become of its work.

    >>> line_of({"number": 3, "state": "open", "kind": "failed", "subject": "dg.x.evt.y",
    ...     "work": {"batch": 1, "group": 2, "first_sample": None, "attempt": 0}, "reason": "no"})
    '     3  open     attempt failed  step 2 (batch 1), group 2: no'
    """
    what = _work(letter["work"]) or letter["subject"]
    reason = plain_cause(letter)[:FIRST_LINE]
    line = (
        f"{letter['number']:6d}  {letter['state']:8} {KINDS[letter['kind']]:14}  {what}: {reason}"
    )
    return f"{line} [{became}]" if became else line


def _work(work: dict[str, Any] | None) -> str:
    if work is None:
        return ""
    part = f", from sample {work['first_sample']} on" if work.get("first_sample") else ""
    return f"{step_of(work['batch'])}, group {work['group']}{part}"


def shown_lines(letter: Letter) -> list[str]:
    """Return a letter with the fields of its message, one per line, each sentence once."""
    found = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(letter["found"]))
    hidden = {"data"} if letter["work"] is None else SHOWN_IN_WORDS
    known = {key: value for key, value in letter.items() if key not in hidden}
    known |= {"found": found, "kind": KINDS[letter["kind"]]}
    if letter["work"] is not None:
        known["work"] = f"{_work(letter['work'])}, attempt {letter['work']['attempt'] + 1}"
    lines = [f"{key}: {value}" for key, value in known.items() if value not in (None, "")]
    return lines + _message_lines(base64.b64decode(letter["data"]), letter)


def _message_lines(data: bytes, letter: Letter) -> list[str]:
    """Return the fields of a message but for those that say what the letter says already."""
    fields = _fields_of(data)
    if fields is None:
        return [f"data: {data!r}"]
    if fields.get("slot") == letter["work"]:
        fields = {key: value for key, value in fields.items() if key != "slot"}
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for path, name, value in _flat("message", fields):
        place = (path, str(value), "" if isinstance(value, str) else name)
        grouped.setdefault(place, []).append(name)
    lines = []
    for (path, text, _), names in grouped.items():
        is_known = " " in text and text in letter["reason"]
        if names != ["reason"] or not is_known:
            lines.append(f"{path} {', '.join(names)}: {'see its reason' if is_known else text}")
    return lines


def _fields_of(data: bytes) -> dict[str, Any] | None:
    """Return the fields of a message, or of the reasons why samples have no score."""
    try:
        return decode(data).model_dump(mode="json", by_alias=False)
    except ContractError:
        pass
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _flat(path: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """Yield each field with the names that lead to it."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{path} {name}", value)
        else:
            yield path, name, value
