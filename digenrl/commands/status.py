"""`digenrl status` and `digenrl watch`: what a run does, once or until it ends."""

import time
from typing import TYPE_CHECKING

import typer

from digenrl.commands import options
from digenrl.local.runs import Run, find_run, read_progress

if TYPE_CHECKING:
    from digenrl.api.client import Client
    from digenrl.local.connection import Connection
    from digenrl.local.running.display import Display

POLL_S = 1.0


def status(
    name: options.RunArgument = "",
    run: options.RunOption = "",
    scheduler: options.SchedulerAddress = "",
    token_file: options.TokenFile = None,
    as_json: options.AsJson = False,
    runs: options.Runs = options.RUNS,
) -> None:
    """Show the state of a run, what its devices wait for, and what would help."""
    from digenrl.local.connection import connect, read_run

    target = find_run(name or run, runs, reads=True)
    with connect(target, scheduler, token_file, services=("page", "scheduler")) as connection:
        reading = read_run(connection)
    lines = reading.model_copy(update={"run": target.name}).lines()  # a folder may be renamed
    if target.is_local and read_progress(target.folder).state == "reporting":
        lines.insert(1, "`digenrl up` evaluates the first and the last version, for the report.")
    typer.echo(reading.model_dump_json(indent=1) if as_json else "\n".join(lines))


def watch(
    name: options.RunArgument = "",
    run: options.RunOption = "",
    scheduler: options.SchedulerAddress = "",
    token_file: options.TokenFile = None,
    as_json: options.AsJson = False,
    runs: options.Runs = options.RUNS,
) -> None:
    """Show the progress of a run, on a terminal as a table; exit when it ends, with 1 if it failed.

    With --json a line is written after each change: the API's view of the run. For an ended run,
    show once how it ended.
    """
    from digenrl.local.connection import connect

    target = find_run(name or run, runs, reads=True)
    with connect(target, scheduler, token_file, services=("scheduler",)) as connection:
        if not connection.is_live:
            raise typer.Exit(_say_end(connection, as_json=as_json))
        from digenrl.local.running.display import Display, make_console

        url, logs = str(connection.client.http.base_url).rstrip("/"), str(target.folder / "logs")
        display = Display(make_console(stderr=as_json), url, logs, lines=as_json)
        with display.shown():
            code = _watch(connection.client, display, target)
    if code is None:
        with connect(target, services=()) as connection:
            code = _say_end(connection, as_json=as_json)
    raise typer.Exit(code)


def _watch(client: "Client", display: "Display", run: Run) -> int | None:
    """Show a run until it ends; returns the exit code, None if it has ended since the last look."""
    from digenrl.api.client import NoAnswer, Refused
    from digenrl.local.runs import ACTIVE_STATES, FINAL_STATES, read_progress

    phase = ""
    while True:
        try:
            now = client.get_run()
            display.update(now, client.list_workers(), client.get_load())
            phase = now.phase
        except (NoAnswer, Refused):
            if not run.is_local:
                display.tell("the scheduler does not answer any more")
                return 0 if phase == "finished" else 1
            phase = read_progress(run.folder).state
            if phase not in ACTIVE_STATES:  # or else another scheduler takes over
                return None
        if phase in FINAL_STATES:
            display.tell(now.failure or f"the run is {phase}")
            return 1 if phase == "failed" else 0
        time.sleep(POLL_S)


def _say_end(connection: "Connection", *, as_json: bool) -> int:
    """Show how a run has ended; returns the exit code."""
    from digenrl.local.connection import read_run

    reading = read_run(connection)
    typer.echo(
        connection.client.get_run().model_dump_json() if as_json else "\n".join(reading.lines())
    )
    return 1 if reading.phase == "failed" else 0
