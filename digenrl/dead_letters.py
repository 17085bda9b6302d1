"""The dead letters of a run for people: asked of its scheduler, or read in the store of a run that
is not in progress."""

import asyncio
import getpass
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from digenrl.client import Client
from digenrl.local.address import client_of
from digenrl.local.runs import Run, in_progress
from digenrl.local.store import store_of
from shared.errors import UserError
from shared.process.settings import ServiceSettings
from shared.run.commits import newest_commit
from shared.run.dead_letters import (
    MOST,
    DeadLetter,
    Letters,
    Settled,
    Wanted,
    letters_now,
    page,
    read_letters,
    settle,
)
from shared.run.run_recipe import needed_recipe
from shared.store import ObjectStore, open_store

Letter = dict[str, Any]
"""A letter as `/v1/dead-letters/{number}` has it."""
NOT_IN_PROGRESS = (
    "the run is not in progress; `digenrl up RECIPE --run {run} --resume` goes on with it, and "
    "does the work of its open batch again"
)
PAGE = 200


class Now(NamedTuple):
    """Says where a run in progress is."""

    committed: int
    """Number of committed batches."""
    phase: str = "running"


class Desk(Protocol):
    """Where letters are asked for."""

    def letters(self, state: Wanted, limit: int, before: int | None) -> list[Letter]:
        """Return the newest first."""

    def every(self, first: int = 1) -> list[Letter]:
        """Return all of the run from number ``first`` on, also those that are settled, the newest
        first."""

    def letter(self, number: int) -> Letter:
        """Return one with its bytes; raises UserError if there is none."""

    def settle(self, number: int, action: Literal["retry", "drop"]) -> str:
        """Return what happens, in words; raises UserError if nothing would follow."""

    def now(self) -> Now | None:
        """Return where the run is; None if it is not in progress."""

    def resume(self) -> None:
        """Go on with the run."""


@dataclass(frozen=True, slots=True)
class ApiDesk:
    """Asks the scheduler."""

    client: Client

    def letters(self, state: Wanted, limit: int, before: int | None) -> list[Letter]:
        found = self.client.list_dead_letters(state, limit, before)
        return [each.model_dump(mode="json") for each in found]

    def every(self, first: int = 1) -> list[Letter]:
        found: list[Letter] = []
        while more := self.letters("all", PAGE, found[-1]["number"] if found else None):
            found += [each for each in more if each["number"] >= first]
            if more[-1]["number"] <= first:
                break
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

    def resume(self) -> None:
        self.client.resume_run()


@dataclass(frozen=True, slots=True)
class StoreDesk:
    """Reads the store of a run that is not in progress."""

    store: ObjectStore
    run: str

    def letters(self, state: Wanted, limit: int, before: int | None) -> list[Letter]:
        chosen = page(reversed(self._kept()), state=state, before=before, limit=limit)
        return [_shown(letter.model_dump(), state) for letter, state in chosen]

    def every(self, first: int = 1) -> list[Letter]:
        return [each for each in self.letters("all", MOST, None) if each["number"] >= first]

    def letter(self, number: int) -> Letter:
        found = dict(self._by_number())
        if number not in found:
            raise UserError(f"there is no dead letter {number}")
        return found[number]

    def settle(self, number: int, action: Literal["retry", "drop"]) -> str:
        self.letter(number)
        if action == "retry":
            raise UserError(NOT_IN_PROGRESS.format(run=self.run))
        settled = Settled(by=getpass.getuser(), at=time.time(), note="the run was not in progress")
        asyncio.run(settle(self.store, self.run, number, "dropped", settled))
        return "nobody needs it any more"

    def now(self) -> Now | None:
        return None

    def resume(self) -> None:
        raise UserError(NOT_IN_PROGRESS.format(run=self.run))

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
def desk_of(run: Run, scheduler: str, token_file: Path | None = None) -> Iterator[Desk]:
    """Yield where to ask: the scheduler that is named or that `digenrl up` runs, or else the store.

    Raises:
        UserError: if the run is in progress and its scheduler does not answer, or there is none.
    """
    if scheduler or in_progress(run.folder):
        with client_of(run, scheduler, token_file, role="operator") as client:
            yield ApiDesk(client)
        return
    with store_of(run):
        store = open_store(ServiceSettings(run=run.id).store)
        asyncio.run(needed_recipe(store, run.id))
        yield StoreDesk(store, run.id)
