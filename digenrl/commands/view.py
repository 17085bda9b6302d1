"""`digenrl view`: the page of all runs, or of one."""

import os
from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands import options
from digenrl.local.runs import find_run
from shared.errors import UserError


def view(
    name: Annotated[
        str,
        typer.Argument(metavar="[RUN]", help=f"{options.RUN_HELP}; by default all runs are shown"),
    ] = "",
    scheduler: Annotated[
        str, typer.Option(help="address of the scheduler's API, while the run is in progress")
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option(help="file with an operator's token for it")
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: options.Port = 0,
    may_start: Annotated[
        bool, typer.Option("--may-start", help="let operators start runs; only on loopback")
    ] = False,
    open_api: options.OpenApi = False,
    plain_http: options.PlainHttp = False,
    runs: options.Runs = options.RUNS,
) -> None:
    """Show all runs, or one, in a browser: pictures, learning, machines and the run itself."""
    from digenrl.api.live import LOOPBACK
    from digenrl.local.running.page import show
    from shared.telemetry import configure_logs, quiet_logs

    if may_start and host not in LOOPBACK:
        raise UserError("--may-start: a recipe can name a Python file; listen on 127.0.0.1")
    one = name or scheduler or os.environ.get("DIGENRL_RUN")
    wanted = find_run(name, runs, reads=True) if one else None
    settings = options.settings_from_options(
        run=wanted.id if wanted else "all", worker="view", host=host, port=port,
        open_api=open_api, plain_http=plain_http,
    )  # fmt: skip
    if scheduler:
        configure_logs(service="view", worker=settings.worker, run=settings.run)
    else:
        quiet_logs()  # somebody reads the terminal
    show(wanted, runs, settings, scheduler, token_file, may_start=may_start)
