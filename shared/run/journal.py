"""The run's journal: what happened that no other object says, in order.

    <run>/journal/<number>.json     one entry, numbered from 1 without gaps (exclusive create)

The scheduler writes it; nothing of a run rests on it. It holds what people asked of the run, with
who asked (the audit log), when the run's phase changed, and alarms of brokers.
"""

import time
from collections.abc import AsyncIterator
from typing import Annotated, Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shared.run.layout import journal_folder, numbers_in
from shared.store import ObjectStore

log = structlog.get_logger()


NOBODY_WORKS = "nobody_works"
"""Alarm while a batch is open and no device works."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    at: float = Field(default_factory=lambda: time.time())
    """Seconds of the Unix clock of the scheduler; nothing goes by it."""


class Request(_Entry):
    """Says who has asked for something that changes the run, and what was answered."""

    kind: Literal["request"] = "request"
    caller: str
    role: str
    on_behalf: str = ""
    """For whom the caller says that it asks, as the run's page does."""
    operation: str
    client: str = ""
    """Address that the request came from."""
    status: int


class PhaseChange(_Entry):
    kind: Literal["phase"] = "phase"
    before: str | None = None
    """Phase before; None if the run has just begun."""
    phase: str
    failure: str | None = None


class Alarm(_Entry):
    kind: Literal["alarm"] = "alarm"
    what: str
    firing: bool
    reason: str | None = None
    """Reason of an alarm that fires."""


Entry = Request | PhaseChange | Alarm
ENTRY: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])


def entry_key(run: str, number: int) -> str:
    return f"{journal_folder(run)}/{number:08d}.json"


async def read_entry(store: ObjectStore, run: str, number: int) -> Entry | None:
    """Return an entry; None if there is none, or it is damaged."""
    data = await store.read(entry_key(run, number))
    try:
        return None if data is None else ENTRY.validate_json(data)
    except ValidationError:
        log.warning("journal_entry_damaged", number=number)
        return None


async def read_newest(
    store: ObjectStore, run: str, before: int | None = None
) -> AsyncIterator[tuple[int, Entry]]:
    """Yield entries with their numbers, newest first, those with numbers below ``before``."""
    newest = await newest_number(store, run)
    last = newest if before is None else min(newest, before - 1)  # a cursor may be made up
    for number in range(last, 0, -1):
        entry = await read_entry(store, run, number)
        if entry is not None:
            yield number, entry


async def newest_number(store: ObjectStore, run: str) -> int:
    """Return the number of the newest entry; 0 if there is none."""
    return max(await numbers_in(store, run, "journal"), default=0)
