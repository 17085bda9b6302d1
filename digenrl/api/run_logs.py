"""Reads what the services of a run have logged, in the order of time, and searches it."""

import heapq
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from fastapi import APIRouter, Query

from services.scheduler.shell.api_models import View, example

LEVELS = ("debug", "info", "warning", "error", "critical")
HIDDEN_FIELDS = frozenset({"svc", "worker", "run", "event", "level", "ts"})
MAX_LINES = 400
"""Newest lines in an answer."""
MAX_TAIL_BYTES = 1 << 21
"""Newest bytes of each log that are searched."""
SECRET = re.compile(
    r"((?:[?&]code|token|password|secret\w*|access_key|authorization)[\"']?\s*[=:]\s*[\"']?"
    r"(?:Bearer )?)[^\s\"'&,]+", re.IGNORECASE
)  # fmt: skip
"""Name of a secret, and its value, which no reader gets."""
BROKER_LINE_FORMATS = (
    (r"\[\d+\] (?P<at>[\d/]+ [\d:.]+) \[(?P<mark>\w+)\] (?P<text>.*)", "%Y/%m/%d %H:%M:%S.%f"),
    (r"\d+:\w (?P<at>\d+ \w+ \d+ [\d:.]+) (?P<mark>\S) (?P<text>.*)", "%d %b %Y %H:%M:%S.%f"),
    (r"(?P<mark>[IWEF])(?P<at>\d{4} [\d:.]+) +(?P<text>.*)", "%m%d %H:%M:%S.%f"),
)
"""Lines of NATS, Valkey and SeaweedFS, and their local times; SeaweedFS writes no year."""
LEVELS_BY_MARK = {
    "DBG": "debug", "TRC": "debug", "INF": "info", "WRN": "warning", "ERR": "error",
    "FTL": "critical", ".": "debug", "-": "debug", "*": "info", "#": "warning", "I": "info",
    "W": "warning", "E": "error", "F": "critical",
}  # fmt: skip
"""Levels by their marks in lines of brokers."""
Level = Literal["debug", "info", "warning", "error", "critical"]


class LogView(View):
    """Log lines of a run's services."""

    model_config = example(
        processes=["reward-0"], lines=["12:00:01.250 reward-0 error: scoring_failed reason=NaN"]
    )

    processes: list[str]
    """Processes that have a log; empty if the logs are on other hosts."""
    lines: list[str]
    """The newest lines that fit, the oldest first; secrets are left out."""


def log_routes(folder: Path | None) -> APIRouter:
    router = APIRouter(tags=["history"])

    @router.get("/v1/logs", operation_id="list_logs")
    def logs(
        word: str = Query("", max_length=200, description="only lines that have this text"),
        process: str = Query("", max_length=100, description="only this process"),
        level: Level = "debug",
    ) -> LogView:
        """The newest log lines of the processes that `digenrl up` has started."""
        return search_logs(folder, word, process, level)

    return router


def search_logs(folder: Path | None, word: str, process: str, level: str) -> LogView:
    """Return the newest lines with a text, of one process or of all."""
    files = (
        {} if folder is None else {path.stem: path for path in sorted(folder.glob("logs/*.log"))}
    )
    chosen = [path for name, path in files.items() if process in ("", name)]
    starts = {path: max(0, path.stat().st_size - MAX_TAIL_BYTES) for path in chosen}
    lines = heapq.merge(*(read(path, starts) for path in chosen))
    shown = (SECRET.sub(r"\1***", str(line)) for line in lines if line.is_from(level))
    found = [line for line in shown if word.lower() in line.lower()]
    return LogView(processes=list(files), lines=found[-MAX_LINES:])


class LogLine(NamedTuple):
    """A line of a log."""

    at: str
    """Time in UTC; empty if unknown."""
    process: str
    level: str
    text: str
    """The line without time and level."""
    raw: str
    """The line as it was written."""

    def is_from(self, level: str) -> bool:
        """Return whether the line's level is at least this one."""
        return LEVELS.index(self.level) >= LEVELS.index(level)

    def __str__(self) -> str:
        return f"{self.at[11:23]} {self.process} {self.level}: {self.text}".strip()


def read(path: Path, positions: dict[Path, int]) -> Iterator[LogLine]:
    """Yield the whole lines after a file's position, which moves on.

    A line without a time, such as a line of a traceback, has time and level of the line before it.
    """
    at, level = "", "info"
    year = datetime.fromtimestamp(path.stat().st_mtime).astimezone().year
    with path.open("rb") as file:
        if positions.get(path, 0) > path.stat().st_size:  # `digenrl host` has cut it
            positions[path] = 0
        file.seek(positions.get(path, 0))
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            positions[path] = positions.get(path, 0) + len(raw)
            line = raw.decode(errors="replace").rstrip()
            fields = parse_line(line, year)
            if line.startswith("Traceback"):
                level = "error"
            at = str(fields.get("ts", at))
            given = fields.get("level", level)
            level = str(given) if given in LEVELS else "info"
            yield LogLine(at, path.stem, level, _text(fields) if fields else line, line)


def parse_line(line: str, year: int) -> dict[str, object]:
    """Return the fields of a line of a service or a broker; of another line, none.

    Args:
        year: year of the lines that have none.
    """
    with suppress(ValueError):
        event = json.loads(line)
        return event if isinstance(event, dict) else {}
    for pattern, form in BROKER_LINE_FORMATS:
        if (found := re.match(pattern, line)) and found["mark"] in LEVELS_BY_MARK:
            given = found["at"] if "%Y" in form else f"{year}{found['at']}"
            local = datetime.strptime(given, form if "%Y" in form else f"%Y{form}")
            at = local.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            return {"ts": at, "level": LEVELS_BY_MARK[found["mark"]], "event": found["text"]}
    return {}


def _text(fields: dict[str, object]) -> str:
    """Return the event and its other fields."""
    rest = (f"{key}={value}" for key, value in fields.items() if key not in HIDDEN_FIELDS)
    return " ".join((str(fields.get("event", "")), *rest))
