"""`digenrl logs`: what the services of a run of `digenrl up` have logged, in the order of time."""

import heapq
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands.options import RUNS, RunArgument, RunOption, Runs
from digenrl.local.runs import find_run
from shared.errors import UserError

LEVELS = ("debug", "info", "warning", "error", "critical")
HIDDEN_FIELDS = frozenset({"svc", "worker", "run", "event", "level", "ts"})
POLL_S = 0.5


def logs(
    name: RunArgument = "",
    run: RunOption = "",
    service: Annotated[
        list[str] | None, typer.Option(help="only this process, such as rollout-1; repeatable")
    ] = None,
    level: Annotated[str, typer.Option(help=f"least level: {', '.join(LEVELS)}")] = "debug",
    follow: Annotated[bool, typer.Option("--follow", help="continue with new lines")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="lines as they were written")] = False,
    runs: Runs = RUNS,
) -> None:
    """Print what the services of a run have logged, in the order of time."""
    folder = find_run(name or run, runs, reads=True).folder / "logs"
    files = chosen(folder, service or [])
    if level not in LEVELS:
        raise UserError(f"--level: {level} is unknown; use one of {', '.join(LEVELS)}")
    positions: dict[Path, int] = {}
    while True:
        lines = heapq.merge(*(read(path, positions) for path in files))
        for _, process, line in lines:
            if (shown := rendered(process, line, level, as_json=as_json)) is not None:
                typer.echo(shown)
        if not follow:
            return
        time.sleep(POLL_S)


def chosen(folder: Path, services: Iterable[str]) -> list[Path]:
    """Return the log files of these processes, of all if none is named.

    Raises:
        UserError: if there is no such folder or file.
    """
    files = {path.stem: path for path in sorted(folder.rglob("*.log"))}
    if not files:
        raise UserError(f"--run: {folder} holds no logs; `digenrl up` keeps them below runs/")
    unknown = [each for each in services if each not in files]
    if unknown:
        raise UserError(f"--service: {unknown[0]} is unknown; use one of {', '.join(files)}")
    return [files[each] for each in services] or list(files.values())


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
