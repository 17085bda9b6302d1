"""`digenrl status` and `digenrl watch`: what a run does, once or until it ends."""

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from digenrl.commands.options import (
    RUNS,
    AsJson,
    RunArgument,
    RunOption,
    Runs,
    SchedulerAddress,
    TokenFile,
)
from digenrl.local.runs import Run, find_run, in_progress
from shared.errors import UserError

if TYPE_CHECKING:
    from digenrl.api.run_history import RunHistory
    from digenrl.client import Client
    from digenrl.local.running.display import Display
    from shared.recipe.recipe import Recipe

POLL_S = 1.0


PAGE_TIMEOUT_S = 2.0
"""Seconds for which the process of the page is waited for: a run is told without it."""


def status(
    name: RunArgument = "",
    run: RunOption = "",
    scheduler: SchedulerAddress = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Say what a run does, what its devices wait for, and what would help."""
    from digenrl.view.state import live_state, stored_state
    from shared.telemetry import quiet_logs

    quiet_logs()
    found = find_run(name or run, runs, reads=True)
    with ExitStack() as stack:
        client = _reach(stack, found, scheduler, token_file)
        if client is None:
            state = asyncio.run(stored_state(_history(stack, found)))
        else:
            alarms = _evaluation_alarms(found, scheduler, token_file)
            state = live_state(client, alarms, _recipe(found.folder))
    lines = state.model_copy(update={"run": found.name}).lines()  # a folder may be renamed
    typer.echo(state.model_dump_json(indent=1) if as_json else "\n".join(lines))


def watch(
    name: RunArgument = "",
    run: RunOption = "",
    scheduler: SchedulerAddress = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Show a run as it goes on, on a terminal as a table; end with it, with 1 if it failed.

    With --json a line is written whenever something has changed: what the API says of the run. Of a
    run that is over, say once how it ended.
    """
    from shared.telemetry import quiet_logs

    quiet_logs()
    found = find_run(name or run, runs, reads=True)
    with ExitStack() as stack:
        client = _reach(stack, found, scheduler, token_file)
        if client is None:
            raise typer.Exit(_say_end(_history(stack, found), as_json=as_json))
        from digenrl.local.running.display import Display, make_console

        url, logs = str(client.http.base_url).rstrip("/"), str(found.folder / "logs")
        display = Display(make_console(stderr=as_json), url, logs, lines=as_json)
        with display.shown():
            code = _watch(client, display, found)
        if code is None:
            code = _say_end(_history(stack, found), as_json=as_json)
        raise typer.Exit(code)


def _evaluation_alarms(run: Run, scheduler: str, token_file: Path | None) -> list[str]:
    """Return the alarms of the newest evaluation, which the process of the page knows; none if that
    does not answer."""
    from digenrl.local.address import connect_client

    try:
        with connect_client(run, scheduler, token_file, of="page") as page:
            page.http.timeout = PAGE_TIMEOUT_S
            return [alarm for each in page.list_evaluations(1) for alarm in each.alarms]
    except UserError:
        return []


def _recipe(folder: Path) -> "Recipe | None":
    """Return the recipe of a run of `digenrl up`; None of others."""
    from shared.recipe.recipe import stored_recipe

    try:
        return stored_recipe((folder / "recipe.json").read_bytes())
    except (OSError, ValueError):
        return None


def _watch(client: "Client", display: "Display", run: Run) -> int | None:
    """Show a run until it ends; returns the exit code, None if it has ended since the last look."""
    from digenrl.client import NoAnswer, Refused
    from digenrl.local.progress import ACTIVE_STATES, FINAL_STATES, read_progress

    phase = ""
    while True:
        try:
            now = client.get_run()
            display.update(
                now.model_dump(mode="json"),
                [each.model_dump(mode="json") for each in client.list_workers()],
                client.get_load().model_dump(mode="json"),
            )
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


def _say_end(history: "RunHistory", *, as_json: bool) -> int:
    """Say how a run has ended; returns the exit code."""
    from digenrl.api.stored import run_view
    from digenrl.view.state import stored_state

    state = asyncio.run(stored_state(history))
    if as_json:
        found = asyncio.run(run_view(history))
        assert found is not None  # or else there is no state
        typer.echo(found.model_dump_json())
    else:
        typer.echo("\n".join(state.lines()))
    return 1 if state.phase == "failed" else 0


def _reach(stack: ExitStack, run: Run, scheduler: str, token_file: Path | None) -> "Client | None":
    """Return a client of a run in progress; None if no scheduler of the run answers.

    Raises:
        UserError: if the one that was named does not answer, or refuses.
    """
    from digenrl.client import NoAnswer, Refused
    from digenrl.local.address import connect_client, last_address

    is_known = in_progress(run.folder) if run.is_local else last_address(run.folder)
    if not (scheduler or is_known):
        return None
    client = stack.enter_context(connect_client(run, scheduler, token_file))
    try:
        answer = client.get_run()
    except (NoAnswer, Refused):
        if scheduler:
            raise
        return None
    is_this = bool(scheduler) or answer.run == run.id  # another run may have the port now
    return client if is_this else None


def _history(stack: ExitStack, run: Run) -> "RunHistory":
    """Return what is stored of a run that is over; its store is open as long as the stack."""
    from digenrl.api.run_history import RunHistory
    from digenrl.local.progress import read_progress
    from digenrl.local.store import run_store
    from shared.process.settings import ServiceSettings
    from shared.store import open_store

    stack.enter_context(run_store(run, reads=read_progress(run.folder).state == "reporting"))
    return RunHistory(open_store(ServiceSettings(run=run.id).store), run.id)
