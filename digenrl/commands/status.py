"""`digenrl status` and `digenrl watch`: what a run does, once or until it ends."""

import asyncio
import json
from contextlib import AsyncExitStack
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
    named,
)
from shared.errors import DigenRLError

if TYPE_CHECKING:
    from digenrl.local.display import Display
    from digenrl.view.live import LiveRun
    from digenrl.view.state import RunState

EVERY_S = 1.0


def status(
    name: RunArgument = "",
    run: RunOption = "",
    scheduler: SchedulerAddress = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Say what a run does, what its devices wait for, and what would help."""
    from digenrl.local.preflight import InProgress
    from digenrl.local.store import store_of
    from digenrl.view.history import RunHistory
    from digenrl.view.state import stored_state
    from shared.process.settings import ServiceSettings
    from shared.store import open_store
    from shared.telemetry import quiet_logs

    quiet_logs()
    wanted = named(name, run)
    state = asyncio.run(_live(runs / wanted, scheduler, token_file))
    if state is None and scheduler:
        raise DigenRLError(f"--scheduler: {scheduler} does not answer, or refuses the token")
    if state is None:
        try:
            with store_of(runs / wanted):
                store = open_store(ServiceSettings(run=wanted).store)
                state = asyncio.run(stored_state(RunHistory(store, wanted)))
        except InProgress as error:
            raise DigenRLError(
                f"{wanted}: its scheduler does not answer: it starts or ends, or the report is made"
            ) from error
    typer.echo(state.model_dump_json(indent=1) if as_json else "\n".join(state.lines()))


def watch(
    name: RunArgument = "",
    run: RunOption = "",
    scheduler: SchedulerAddress = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Show a run as it goes on, on a terminal as a table; end with it, with 1 if it failed.

    With --json a line is written whenever something has changed: what the API says of the run.
    """
    folder = runs / named(name, run)
    raise typer.Exit(asyncio.run(_watch(folder, scheduler, token_file, as_json=as_json)))


async def _live(folder: Path, scheduler: str, token_file: Path | None) -> "RunState | None":
    from digenrl.view.state import live_state

    async with AsyncExitStack() as stack:
        return await live_state(await _reach(stack, folder, scheduler, token_file))


class Lines:
    """Writes what the API says of a run as lines of JSON."""

    def __init__(self) -> None:
        self._seen: object = None

    def update(self, run: object, workers: object) -> None:
        if run != self._seen:
            self._seen = run
            typer.echo(json.dumps(run))

    def tell(self, text: str) -> None:
        typer.echo(text, err=True)


async def _watch(folder: Path, scheduler: str, token_file: Path | None, *, as_json: bool) -> int:
    async with AsyncExitStack() as stack:
        live = await _reach(stack, folder, scheduler, token_file)
        display = Lines() if as_json else _table(stack, live, folder)
        seen = None
        while True:
            run, workers = await live.get("/v1/run"), await live.get("/v1/workers")
            if run is None and seen is None:
                raise DigenRLError(f"{folder.name} does not run, or its scheduler does not answer")
            if run is None:
                display.tell("the scheduler does not answer any more")
                return 0 if seen == "finished" else 1
            display.update(run, workers or [])
            seen = run["phase"]
            if seen in ("finished", "stopped", "failed"):
                display.tell(run["failure"] or f"the run is {seen}")
                return 1 if seen == "failed" else 0
            await asyncio.sleep(EVERY_S)


def _table(stack: AsyncExitStack, live: "LiveRun", folder: Path) -> "Display":
    from rich.console import Console

    from digenrl.local.display import Display

    display = Display(Console(), live.url, str(folder / "logs"))
    stack.enter_context(display.shown())
    return display


async def _reach(
    stack: AsyncExitStack, folder: Path, scheduler: str, token_file: Path | None
) -> "LiveRun":
    """Return how to ask a run's scheduler; its address is empty if nobody has said where it is."""
    from digenrl.local.address import address_of
    from digenrl.local.tokens import KEYS
    from digenrl.view.live import LiveRun, client_of

    if not scheduler and (scheduler := address_of(folder)):
        token_file = token_file or folder / KEYS / "viewer.token"
    client = await stack.enter_async_context(client_of(scheduler, token_file))
    return LiveRun(scheduler.rstrip("/"), client)
