"""`digenrl logs`: what the services of a run of `digenrl up` have logged, in the order of time."""

import heapq
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from digenrl.api.run_logs import LEVELS, read
from digenrl.commands.options import RUNS, RunArgument, RunOption, Runs
from digenrl.local.runs import find_run
from shared.errors import UserError

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
        for line in heapq.merge(*(read(path, positions) for path in files)):
            if line.is_from(level):
                typer.echo(line.raw if as_json else line)
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
