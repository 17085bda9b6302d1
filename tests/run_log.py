"""Logs of runs, as tests fill them."""

from typing import Any

from digenrl.api.feed import Feed
from digenrl.api.run_history import RunHistory
from services.scheduler.shell.api_letters import Letters
from shared.run.log import Log
from shared.run.log_entries import DeadLetter, Entry
from shared.store import ObjectStore


async def append(store: ObjectStore, run: str, *entries: Entry) -> None:
    """Append entries to the log of a run, as its scheduler does."""
    log = Log.of_run(store, run)
    for each in entries:
        await log.append(each)


def letter(number: int, **fields: Any) -> DeadLetter:
    """Return a letter about an attempt that failed; ``number`` distinguishes it from others."""
    known: dict[str, Any] = {
        "digest": f"{number:064x}", "kind": "failed", "stream": "DG_EVT", "subject": "dg.test.evt",
        "reason": "no", "data": "", "at": 1.0,
    }  # fmt: skip
    return DeadLetter(**known | {"number": number} | fields)


def letters_of(*entries: Entry) -> Letters:
    """Return the letters of a log of these entries, in this order."""
    return Letters().read(entries)


def feed_of(store: ObjectStore, run: str) -> Feed:
    return Feed(RunHistory(store, run), Log.of_evaluations(store, run))
