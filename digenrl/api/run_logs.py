"""Reads what the services of a run have logged, in the order of time, and searches it."""

import heapq
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

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
    rows = heapq.merge(*(read(path, starts) for path in chosen))
    shown = (rendered(name, line, level, as_json=False) for _, name, line in rows)
    hidden = (SECRET.sub(r"\1***", line) for line in shown if line is not None)
    lines = [line for line in hidden if word.lower() in line.lower()][-MAX_LINES:]
    return LogView(processes=list(files), lines=lines)


def read(path: Path, positions: dict[Path, int]) -> Iterator[tuple[str, str, str]]:
    """Yield time, process and text of the whole lines after a file's position, which moves on.

    A line without a time, such as a line of a traceback, has the time of the line before it."""
    at = ""
    with path.open("rb") as file:
        file.seek(positions.get(path, 0))
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            positions[path] = positions.get(path, 0) + len(raw)
            line = raw.decode(errors="replace").rstrip()
            at = str(parse_line(line).get("ts", at))
            yield at, path.stem, line


def parse_line(line: str) -> dict[str, object]:
    """Return the fields of a line of one of our services; of another program's line, none."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def rendered(process: str, line: str, level: str, *, as_json: bool) -> str | None:
    """Return a line for people, or None if its level is lower than asked for."""
    fields = parse_line(line)
    given = str(fields.get("level", "info"))
    if given in LEVELS and LEVELS.index(given) < LEVELS.index(level):
        return None
    if as_json or not fields:
        return line if as_json else f"{process}: {line}"
    rest = " ".join(f"{key}={value}" for key, value in fields.items() if key not in HIDDEN_FIELDS)
    at = str(fields.get("ts", ""))[11:23]
    return f"{at} {process} {given}: {fields.get('event', '')} {rest}".rstrip()
