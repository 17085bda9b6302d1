"""The dead letters of a run for people: asked of its scheduler, or read in the store of a run that
is not in progress."""

import asyncio
import base64
import getpass
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import httpx

from digenrl.client import Client
from digenrl.local.address import address_of, client_of
from digenrl.local.store import store_of
from shared.errors import ContractError, UserError
from shared.messages.codec import decode
from shared.process.settings import ServiceSettings
from shared.run.commits import newest_commit
from shared.run.dead_letters import (
    MOST,
    DeadLetter,
    Fates,
    Letters,
    Noted,
    Settled,
    Work,
    cause_of,
    letters_now,
    mend_first,
    page,
    read_letters,
    settle,
)
from shared.run.run_recipe import needed_recipe
from shared.store import ObjectStore, open_store

State = Literal["open", "retried", "dropped", "over", "all"]
Letter = dict[str, Any]
"""A letter as `/v1/dead-letters/{number}` has it."""
PAGE = 200
FIRST_LINE = 160
MOST_NAMED = 20
"""Letters that a command names one by one."""


class Now(NamedTuple):
    """Says where a run in progress is."""

    committed: int
    """Number of committed batches."""
    phase: str = "running"


class Desk(Protocol):
    """Where letters are asked for."""

    def letters(self, state: State, limit: int, before: int | None) -> list[Letter]:
        """Return the newest first."""

    def every(self) -> list[Letter]:
        """Return all of the run, also those that are settled, the newest first."""

    def letter(self, number: int) -> Letter:
        """Return one with its bytes; raises UserError if there is none."""

    def settle(self, number: int, action: Literal["retry", "drop"]) -> str:
        """Return what happens, in words; raises UserError if nothing would follow."""

    def now(self) -> Now | None:
        """Return where the run is; None if it is not in progress."""


@dataclass(frozen=True, slots=True)
class ApiDesk:
    """Asks the scheduler."""

    client: Client

    def letters(self, state: State, limit: int, before: int | None) -> list[Letter]:
        found = self.client.list_dead_letters(state, limit, before)
        return [each.model_dump(mode="json") for each in found]

    def every(self) -> list[Letter]:
        found: list[Letter] = []
        while more := self.letters("all", PAGE, found[-1]["number"] if found else None):
            found += more
        return found

    def letter(self, number: int) -> Letter:
        return self.client.get_dead_letter(number).model_dump(mode="json")

    def settle(self, number: int, action: Literal["retry", "drop"]) -> str:
        if action == "retry":
            return self.client.retry_dead_letter(number).note
        return self.client.drop_dead_letter(number).note

    def now(self) -> Now | None:
        run = self.client.get_run()
        return Now(run.step, run.phase)


@dataclass(frozen=True, slots=True)
class StoreDesk:
    """Reads the store of a run that is not in progress."""

    store: ObjectStore
    run: str

    def letters(self, state: State, limit: int, before: int | None) -> list[Letter]:
        chosen = page(reversed(self._kept()), state=state, before=before, limit=limit)
        return [_shown(letter.model_dump(), state) for letter, state in chosen]

    def every(self) -> list[Letter]:
        return self.letters("all", MOST, None)

    def letter(self, number: int) -> Letter:
        found = dict(self._by_number())
        if number not in found:
            raise UserError(f"there is no dead letter {number}")
        return found[number]

    def settle(self, number: int, action: Literal["retry", "drop"]) -> str:
        self.letter(number)
        if action == "retry":
            raise UserError(
                "the run is not in progress; `digenrl up RECIPE --run "
                f"{self.run} --resume` goes on with it, and does the work of its open batch again"
            )
        settled = Settled(by=getpass.getuser(), at=time.time(), note="the run was not in progress")
        asyncio.run(settle(self.store, self.run, number, "dropped", settled))
        return "nobody needs it any more"

    def now(self) -> Now | None:
        return None

    def _by_number(self) -> Iterator[tuple[int, Letter]]:
        for letter, state in self._kept():
            yield letter.number, _shown(letter.model_dump(), state)

    def _kept(self) -> list[tuple[DeadLetter, Letters]]:
        """Return all letters, oldest first, with what they are now."""

        async def read() -> list[tuple[DeadLetter, Letters]]:
            newest = await newest_commit(self.store, self.run)
            committed = 0 if newest is None else newest.policy.version
            return letters_now(await read_letters(self.store, self.run), committed)

        return asyncio.run(read())


def _shown(stored: Letter, state: str) -> Letter:
    data = stored["data"]
    hidden = stored.keys() - {"digest"}
    size = len(data) * 3 // 4 - data.count("=")
    return {key: stored[key] for key in stored if key in hidden} | {
        "state": state,
        "num_bytes": size,
        "is_given": False,
    }


@contextmanager
def desk_of(run: str, runs: Path, scheduler: str) -> Iterator[Desk]:
    """Yield where to ask: the scheduler that is named or that `digenrl up` runs, or else the store.

    Raises:
        UserError: if the run is in progress and its scheduler does not answer, or there is none.
    """
    folder = runs / run
    if scheduler or _answers(address_of(folder)):
        with client_of(folder, scheduler, role="operator") as client:
            yield ApiDesk(client)
        return
    with store_of(folder):
        store = open_store(ServiceSettings(run=run).store)
        asyncio.run(needed_recipe(store, run))
        yield StoreDesk(store, run)


def _answers(address: str) -> bool:
    try:
        return bool(address) and httpx.get(f"{address}/livez", timeout=5).is_success
    except httpx.HTTPError:
        return False


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
    def read(cls, desk: Desk, run: str) -> "Book":
        return cls.of(run, desk.every(), desk.now())

    def chosen(self, state: State, before: int | None = None, reason: str = "") -> list[Letter]:
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
        return [
            f"a retry may help {len(useful)} of {opened}: `digenrl dlq retry {self.run} {which}`",
            *others,
        ]

    def _time_for_it(self, useful: Sequence[int]) -> list[str]:
        """Return how there is time to mend what fails, and what comes after it."""
        assert self.now is not None
        catch = f"digenrl pause {self.run} --at-failure"
        if self.now.phase == "running":
            return [
                f"for time to mend it: `{catch}` pauses the run as soon as samples cannot be "
                f"scored; then mend, retry, and `digenrl resume {self.run}`"
            ]
        if self.now.phase != "paused":
            return []
        resume = f"digenrl resume {self.run}"
        if useful:
            return [f"the run is paused: what is retried is done after `{resume}`"]
        return [f"to catch the next one: `{catch} && {resume}`"]


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
