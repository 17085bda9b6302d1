"""What the dead letters of a run say to people, and what has become of each."""

import base64
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from digenrl.dead_letters import Desk, Letter, Now
from shared.errors import ContractError
from shared.messages.codec import decode
from shared.run.dead_letters import Fates, Noted, Wanted, Work, cause_of, mend_first

FIRST_LINE = 160
MOST_NAMED = 20
"""Letters that a command names one by one."""


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
        return cls(run, letters, now, Fates.of(map(_noted, letters), committed))

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
            and reason.lower() in _cause(each).lower()
        ]

    def outcome(self, letter: Letter) -> str:
        """Return in words what has become of what a letter is about; empty if not known."""
        return self.fates.outcome(_noted(letter))

    def is_known(self, letter: Letter) -> bool:
        """Return whether it is known what has become of the work of a letter that was retried."""
        work = letter["work"]
        is_over = work is None or (self.now is not None and work["batch"] < self.now.committed)
        return is_over or bool(self.fates.later(_noted(letter)))

    def helped(self, letters: Sequence[Letter]) -> list[int]:
        """Return the numbers of the open ones for which a retry may change something."""
        if self.now is None:
            return []
        return [
            each["number"]
            for each in letters
            if each["state"] == "open" and self.fates.why_not_retried(_noted(each)) is None
        ]

    def settle(self, desk: Desk, number: int, action: Literal["retry", "drop"]) -> str:
        """Settle a letter; return what happens, in words.

        Raises:
            UserError: if there is no such letter, or nothing would follow.
        """
        letter = next((each for each in self.letters if each["number"] == number), None)
        if action == "drop" or letter is None:
            return desk.settle(number, action)
        later = self.fates.later(_noted(letter))
        if letter["state"] == "retried" and not later:
            return f"letter {number} was retried before"
        if later:  # the newest says whether anything can be done
            return self.settle(desk, later[-1].number, action)
        return desk.settle(number, action)

    def retried(self) -> list[Letter]:
        """Return the retried letters, of each piece of work the newest."""
        return [each for each in self.chosen("retried") if not self.fates.later(_noted(each))]

    def newest(self, number: int) -> int:
        """Return the newest letter about the work of a letter."""
        letter = next((each for each in self.letters if each["number"] == number), None)
        later = [] if letter is None else self.fates.later(_noted(letter))
        return later[-1].number if later else number

    def lines(self, letters: Sequence[Letter]) -> list[str]:
        """Return a line for each letter."""
        return [self._line(each) for each in letters]

    def _line(self, letter: Letter) -> str:
        why = self.fates.why_not_retried(_noted(letter)) or ""
        is_older = letter["state"] == "open" and why.startswith("see ")
        return line_of(letter, why if is_older else self.outcome(letter))

    def reasons(self, letters: Sequence[Letter]) -> list[str]:
        """Return a line for each reason, the most frequent first: how many letters have it, the
        newest of them, and of how many a retry may help."""
        grouped: dict[str, list[Letter]] = {}
        for each in letters:
            grouped.setdefault(_cause(each), []).append(each)
        return [
            f"{len(those):6d}  newest {those[0]['number']}{self._helps(those)}: "
            f"{cause[:FIRST_LINE]}"
            for cause, those in sorted(grouped.items(), key=lambda item: -len(item[1]))
        ]

    def _helps(self, letters: Sequence[Letter]) -> str:
        if self.now is None:
            return ""
        return f", a retry may help {len(self.helped(letters))}"

    def hints(self) -> list[str]:
        """Return lines that say what may be done about the open letters, with the command for it,
        and what is to be mended first; none if the run is not in progress, or has no letters."""
        opened, over = self.chosen("open"), self.chosen("over")
        if self.now is None or not (opened or over):
            return []
        useful, letters = self.helped(opened), {e["number"]: e["reason"] for e in opened}
        return [
            *self._what_helps(useful, len(opened), len(over)),
            *dict.fromkeys(filter(None, (mend_first(letters[each]) for each in useful))),
            *self._time_for_it(useful),
        ]

    def _what_helps(self, useful: Sequence[int], opened: int, over: int) -> list[str]:
        are = "is over: its batch is" if over == 1 else "are over: their batches are"
        ends = f"{over} {are} committed, or the group was given to be trained, or a later one came"
        if not opened:
            return [f"none is open, so nothing can be done again; {ends}"]
        others = [ends] if over else []
        if not useful:
            return [
                f"a retry helps none of the open letters: `digenrl dlq drop {self.run} --all`",
                *others,
            ]
        which = " ".join(map(str, useful)) if len(useful) <= MOST_NAMED else "--all"
        if self.now is not None and self.now.phase == "paused":
            which = "--all --resume"
        command = f"`digenrl dlq retry {self.run} {which}`"
        return [f"a retry may help {len(useful)} of {opened}: {command}", *others]

    def _time_for_it(self, useful: Sequence[int]) -> list[str]:
        """Return how there is time to mend what fails, and what comes after it."""
        assert self.now is not None
        catch = f"`digenrl pause {self.run} --at-failure`"
        if self.now.phase == "running":
            return [
                f"for time to mend it: {catch} pauses the run at the next failure; then mend, and "
                f"`digenrl dlq retry {self.run} --all --resume`"
            ]
        if self.now.phase != "paused" or useful:
            return []
        return [f"to catch the next one: {catch}, and `digenrl resume {self.run}`"]


def _noted(letter: Letter) -> Noted:
    work = None if letter["work"] is None else Work.model_validate(letter["work"])
    return Noted(letter["number"], letter["kind"], letter["state"], work, letter["is_given"])


def _cause(letter: Letter) -> str:
    return cause_of(letter["kind"], letter["reason"])


def every_open(book: Book) -> list[int]:
    """Return the numbers of all open letters, newest first."""
    return [each["number"] for each in book.chosen("open")]


def line_of(letter: Letter, became: str = "") -> str:
    """Return a letter as one line of a table, with what has become of its work.

    >>> line_of({"number": 3, "state": "open", "kind": "failed", "subject": "dg.x.evt.y",
    ...     "work": {"batch": 1, "group": 2, "first_sample": None, "attempt": 0}, "reason": "no"})
    '     3  open     failed       batch 1 group 2: no'
    """
    what = _work(letter["work"]) or letter["subject"]
    reason = _cause(letter)[:FIRST_LINE]
    line = f"{letter['number']:6d}  {letter['state']:8} {letter['kind']:12} {what}: {reason}"
    return f"{line} [{became}]" if became else line


def _work(work: dict[str, Any] | None) -> str:
    if work is None:
        return ""
    sample = work.get("first_sample")
    return f"batch {work['batch']} group {work['group']}" + (
        "" if sample is None else f" sample {sample}"
    )


def shown_lines(letter: Letter) -> list[str]:
    """Return a letter with the fields of its message, one per line, each sentence once."""
    found = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(letter["found"]))
    known = {key: value for key, value in letter.items() if key != "data"} | {"found": found}
    if letter["work"] is not None:
        known["work"] = f"{_work(letter['work'])}, attempt {letter['work']['attempt']}"
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
