"""Events of a run, in the same order for every reader: commits, the run's log and the log of
evaluations.

The object store numbers the facts of each source without gaps. A position is the number of facts
read from each source. A reader that continues from its position misses no fact and gets no
fact twice, even from another server process. The feed has no state per reader, and reads each
object once for all readers.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from digenrl.api.run_history import RunHistory
from shared.errors import ContractError
from shared.run.chain import CommitSummary
from shared.run.commits import CommitRecord
from shared.run.log import Log
from shared.run.log_entries import DeadLetter, Entry, Evaluation

ABSENCE_CACHE_S = 0.5
"""Seconds for which the absence of an object is cached."""
MAX_EVENTS_PER_READ = 64
"""Maximum number of events of a source in one response."""
POSITION = re.compile(r"c(\d{1,9})\.l(\d{1,9})\.e(\d{1,9})", re.ASCII)

Fields = dict[str, Any]


class Fact(NamedTuple):
    """An event for readers. The name is empty if a number has no event."""

    name: str = ""
    fields: Fields = {}  # noqa: RUF012 -- never changed


@dataclass(frozen=True, slots=True)
class Position:
    """Number of facts of each source that a reader has read."""

    commits: int = 0
    log: int = 0
    evaluations: int = 0

    def __str__(self) -> str:
        return f"c{self.commits}.l{self.log}.e{self.evaluations}"

    @classmethod
    def parse(cls, text: str) -> "Position | None":
        """Return the position; None for an invalid text.

        >>> str(Position.parse("c3.l7.e1"))
        'c3.l7.e1'
        >>> Position.parse("12")
        """
        match = POSITION.fullmatch(text)
        return None if match is None else cls(*map(int, match.groups()))


def commit_fields(record: CommitRecord | CommitSummary) -> Fields:
    """Return the fields of the event of a commit."""
    return {
        "version": record.policy.version, "batch": record.batch,
        "reward_mean": record.metrics.get("reward_mean"), "metrics": dict(record.metrics),
        "weights_digest": record.policy.weights_digest,
    }  # fmt: skip


def evaluation_fields(entry: Evaluation) -> Fields:
    """Return the fields of the event of a finished evaluation."""
    return {
        "version": entry.version, "settings": entry.settings, "seconds": entry.seconds,
        "alarms": list(entry.alarms), **entry.figures,
    }  # fmt: skip


def _fact(entry: CommitSummary | Entry | None) -> Fact:
    if entry is None:
        return Fact()
    if isinstance(entry, CommitSummary):
        return Fact("commit", commit_fields(entry))
    if isinstance(entry, Evaluation):
        return Fact(entry.event, evaluation_fields(entry))
    hidden = {"event", "data", "digest", "stream"}
    if not isinstance(entry, DeadLetter):
        hidden.add("number")
    return Fact(entry.event, entry.model_dump(exclude=hidden))


@dataclass(slots=True)
class Feed:
    """Returns the events after a position."""

    history: RunHistory
    evaluations: Log

    @property
    def run(self) -> str:
        return self.history.run

    async def now(self) -> Position:
        """Return the position after the newest event."""
        await self.history.look_for_steps(0.0)
        return Position(*map(len, await self._logs(0.0)))

    async def after(self, at: Position) -> list[tuple[Position, Fact]]:
        """Return the events after a position, each with the position that follows it.

        Raises:
            Unavailable: if the store does not respond.
        """
        with suppress(ContractError):  # a damaged record stops the run, not its readers
            await self.history.look_for_steps(ABSENCE_CACHE_S)
        events: list[tuple[Position, Fact]] = []
        logs = await self._logs(ABSENCE_CACHE_S)
        for name, facts in zip(("commits", "log", "evaluations"), logs, strict=True):
            first: int = getattr(at, name)
            for number, fact in enumerate(facts[first : first + MAX_EVENTS_PER_READ], first + 1):
                at = replace(at, **{name: number})
                events.append((at, _fact(fact)))
        return events

    async def _logs(self, max_age_s: float) -> tuple[Sequence[CommitSummary | Entry | None], ...]:
        for each in (self.history.log, self.evaluations):
            await each.look(max_age_s)
        return self.history.steps, self.history.log.numbered, self.evaluations.numbered
