"""Entries of the logs of a run: one record per event, with its kind.

request       who requested a change of the run, and the answer (the audit log)
phase         the run's phase changed
alarm         an alarm of the scheduler began or ended
dead_letter   a message that no service could use, or work that failed
settled       what an operator did about dead letters
evaluation    a version was evaluated
"""

import base64
import time
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter

NO_DEVICE_WORKS = "nobody_works"
"""Alarm while a batch is open and no device works."""

LetterKind = Literal["unreadable", "undelivered", "failed", "unscored", "refused"]
"""
unreadable    bytes that are no message, or one under another's subject
undelivered   work that was delivered several times and never finished
failed        an attempt at a piece of work that a worker has given up, with its reason
unscored      samples without a score: why; their fragment counts without them
refused       a message that is not true, such as of a version that was never committed
"""
Settlement = Literal["retried", "dropped"]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int = 0
    """Number of the entry in its log, also in its key; 0 before the entry is appended."""
    at: float = Field(default_factory=lambda: time.time())
    """Seconds of the writer's Unix clock; nothing is ordered by it."""

    @property
    def fact(self) -> str:
        """Identity of the entry: a log states it once."""
        return self.model_dump_json(exclude={"number"})


class Request(_Entry):
    """Records a request that changes the run, and the answer."""

    event: Literal["request"] = "request"
    caller: str
    role: str
    on_behalf: str = ""
    """Caller for whom the request was forwarded, as by the run's page."""
    operation: str
    client: str = ""
    """Address that the request came from."""
    status: int


class PhaseChange(_Entry):
    event: Literal["phase"] = "phase"
    before: str | None = None
    """Phase before; None if the run has just begun."""
    phase: str
    failure: str | None = None


class Alarm(_Entry):
    event: Literal["alarm"] = "alarm"
    what: str
    firing: bool
    reason: str | None = None
    """Reason of an alarm that fires."""


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
    """The failed attempt."""

    @property
    def whole_group(self) -> tuple[int, int]:
        """Batch and group, which a retry repeats."""
        return self.batch, self.group


class DeadLetter(_Entry):
    event: Literal["dead_letter"] = "dead_letter"
    digest: str
    """sha256 of the failure: the same failure is the same letter."""
    kind: LetterKind
    stream: str
    subject: str
    reason: str
    work: Work | None = None
    data: str
    """The message's bytes, in base64."""

    @property
    def fact(self) -> str:
        return self.digest

    @property
    def bytes(self) -> bytes:
        return base64.b64decode(self.data)


class Settled(_Entry):
    """Records what an operator did about dead letters, by their numbers."""

    event: Literal["settled"] = "settled"
    letters: tuple[int, ...]
    how: Settlement
    by: str
    note: str = ""


class Evaluation(_Entry):
    """Announces an evaluation record."""

    event: Literal["evaluation"] = "evaluation"
    version: int
    settings: str
    """Folder of the records at the same settings."""
    seconds: float
    alarms: tuple[str, ...] = ()
    figures: dict[str, JsonValue]

    @property
    def fact(self) -> str:
        return f"{self.settings}/{self.version}"


Entry = Request | PhaseChange | Alarm | DeadLetter | Settled | Evaluation
ENTRY: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="event")])
