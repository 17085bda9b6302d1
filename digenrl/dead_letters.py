"""The dead letters of a run for people: asked of its scheduler, or read in the store of a run that
is not in progress."""

import asyncio
import getpass
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx

from digenrl.client import Client
from digenrl.local.address import address_of, client_of
from digenrl.local.store import store_of
from shared.errors import UserError
from shared.process.settings import ServiceSettings
from shared.run.dead_letters import (
    Settled,
    Work,
    outcome_of,
    page,
    read_letters,
    settle,
    why_not_retried,
)
from shared.run.run_recipe import needed_recipe
from shared.store import ObjectStore, open_store

State = Literal["open", "retried", "dropped", "all"]
Letter = dict[str, Any]
"""A letter as `/v1/dead-letters/{number}` has it."""
PAGE = 200
FIRST_LINE = 160


class Desk(Protocol):
    """Where letters are asked for."""

    def letters(self, state: State, limit: int, before: int | None) -> list[Letter]:
        """Return the newest first."""

    def letter(self, number: int) -> Letter:
        """Return one with its bytes; raises UserError if there is none."""

    def settle(self, number: int, action: Literal["retry", "drop"]) -> str:
        """Return what happens, in words; raises UserError if nothing would follow."""

    def committed(self) -> int | None:
        """Return how many batches are committed; None if the run is not in progress."""


@dataclass(frozen=True, slots=True)
class ApiDesk:
    """Asks the scheduler."""

    client: Client

    def letters(self, state: State, limit: int, before: int | None) -> list[Letter]:
        found = self.client.list_dead_letters(state, limit, before)
        return [each.model_dump(mode="json") for each in found]

    def letter(self, number: int) -> Letter:
        return self.client.get_dead_letter(number).model_dump(mode="json")

    def settle(self, number: int, action: Literal["retry", "drop"]) -> str:
        if action == "retry":
            return self.client.retry_dead_letter(number).note
        return self.client.drop_dead_letter(number).note

    def committed(self) -> int | None:
        return self.client.get_run().step


@dataclass(frozen=True, slots=True)
class StoreDesk:
    """Reads the store of a run that is not in progress."""

    store: ObjectStore
    run: str

    def letters(self, state: State, limit: int, before: int | None) -> list[Letter]:
        found = asyncio.run(read_letters(self.store, self.run))
        chosen = page(found, state=state, before=before, limit=limit)
        return [_shown(letter.model_dump(), state) for letter, state in chosen]

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

    def committed(self) -> int | None:
        return None

    def _by_number(self) -> Iterator[tuple[int, Letter]]:
        for letter, state in asyncio.run(read_letters(self.store, self.run)):
            yield letter.number, _shown(letter.model_dump(), state)


def _shown(stored: Letter, state: str) -> Letter:
    data = stored["data"]
    hidden = stored.keys() - {"digest"}
    size = len(data) * 3 // 4 - data.count("=")
    return {key: stored[key] for key in stored if key in hidden} | {
        "state": state,
        "num_bytes": size,
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


def before_list(found: Sequence[Letter], committed: int | None, run: str) -> str:
    """Return a line that says of which of these letters a retry may change something, and the
    command for it; empty if the run is not in progress, or none is open."""
    opened = [each for each in found if each["state"] == "open"]
    if committed is None or not opened:
        return ""
    useful = [str(each["number"]) for each in opened if _may_help(each, committed)]
    if not useful:
        return (
            "nothing is left to be done again: the batches of these letters are committed, or the "
            "samples count without a score. What is generated from now on is scored anew; "
            f"`digenrl dlq drop {run} --all` clears the list"
        )
    return (
        f"a retry may help {len(useful)} of {len(opened)}: `digenrl dlq retry {run} "
        f"{' '.join(useful)}`; of the others the work is done since, or counts without a score"
    )


def outcome_of_letter(letter: Letter, committed: int | None) -> str:
    """Return in words what has become of what a letter is about; empty if that is not known."""
    return outcome_of(letter["state"], letter["kind"], _work_of(letter), committed or 0)


def _may_help(letter: Letter, committed: int) -> bool:
    return why_not_retried(letter["kind"], _work_of(letter), committed) is None


def _work_of(letter: Letter) -> Work | None:
    return None if letter["work"] is None else Work.model_validate(letter["work"])


def every_open(desk: Desk) -> list[int]:
    """Return the numbers of all open letters, newest first."""
    found: list[int] = []
    while True:
        numbers = [
            each["number"] for each in desk.letters("open", PAGE, found[-1] if found else None)
        ]
        if not numbers:
            return found
        found += numbers


def line_of(letter: Letter, committed: int | None = None) -> str:
    """Return a letter as one line of a table, with what has become of its work.

    >>> line_of({"number": 3, "state": "open", "kind": "failed", "subject": "dg.x.evt.y",
    ...     "work": {"batch": 1, "group": 2, "first_sample": None, "attempt": 0}, "reason": "no"})
    '     3  open     failed       batch 1 group 2: no'
    """
    what = _work(letter["work"]) or letter["subject"]
    reason = " ".join(letter["reason"].split())[:FIRST_LINE]
    became = outcome_of_letter(letter, committed)
    line = f"{letter['number']:6d}  {letter['state']:8} {letter['kind']:12} {what}: {reason}"
    return f"{line} [{became}]" if became else line


def _work(work: dict[str, Any] | None) -> str:
    if work is None:
        return ""
    sample = work.get("first_sample")
    return f"batch {work['batch']} group {work['group']}" + (
        "" if sample is None else f" sample {sample}"
    )
