"""`digenrl view`: the page of a run, and of runs that are compared with it."""

from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands.options import (
    RUN_HELP,
    RUNS,
    OpenApi,
    PlainHttp,
    Port,
    Runs,
    settings_from_options,
)
from digenrl.local.runs import find_run


def view(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help=f"{RUN_HELP}, and others to compare it with; by default the newest run",
        ),
    ] = None,
    scheduler: Annotated[
        str, typer.Option(help="address of the scheduler's API, while the run is in progress")
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option(help="file with an operator's token for it")
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Port = 0,
    open_api: OpenApi = False,
    plain_http: PlainHttp = False,
    runs: Runs = RUNS,
) -> None:
    """Show a run's page in a browser: curves, timeline, samples, workers and decisions."""
    from digenrl.local.running.page import show
    from shared.telemetry import configure_logs, quiet_logs

    wanted = [find_run(name, runs, reads=True) for name in names or [""]]
    settings = settings_from_options(
        run=wanted[0].id,
        worker="view",
        host=host,
        port=port,
        open_api=open_api,
        plain_http=plain_http,
    )
    if scheduler:
        configure_logs(service="view", worker=settings.worker, run=settings.run)
    else:
        quiet_logs()  # somebody reads the terminal
    show(wanted, settings, scheduler, token_file)
