"""`digenrl evaluate`: evaluation of policy versions during a run."""

import asyncio
import os
from typing import Annotated

import typer

from digenrl.commands import options
from digenrl.local.runs import find_run


def evaluate(
    name: options.RunArgument = "",
    run: options.RunOption = "",
    once: Annotated[
        bool, typer.Option("--once", help="evaluate what is due now, then exit")
    ] = False,
    every: Annotated[
        int | None,
        typer.Option(min=1, help="optimizer steps between evaluations, overrides the recipe"),
    ] = None,
    worker: Annotated[
        str, typer.Option(help="name of this evaluator; by default host and process")
    ] = "",
    nice: Annotated[
        int, typer.Option(min=0, max=19, help="CPU niceness; 19 takes only what others leave")
    ] = 0,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: options.Port = 0,
    stay: Annotated[
        bool, typer.Option("--stay", help="keep running after the run, in case it is resumed")
    ] = False,
    open_api: options.OpenApi = False,
    plain_http: options.PlainHttp = False,
    runs: options.Runs = options.RUNS,
) -> None:
    """Evaluate a run's policy versions, at a fixed interval of optimizer steps.

    It follows a deployed run while that is in progress. A run of `digenrl up` evaluates by itself,
    if evaluation.every is in its recipe; this command then evaluates the remaining versions.
    """
    from digenrl.local.store import run_store
    from shared.telemetry import configure_logs

    target = find_run(name or run, runs, reads=True)
    with run_store(target):
        settings = options.settings_from_options(
            run=target.id, worker=worker, host=host, port=port, stay=stay, open_api=open_api,
            plain_http=plain_http,
        )  # fmt: skip
        configure_logs(service="evaluation", worker=settings.worker, run=settings.run)
        os.nice(nice)
        from digenrl.evaluation.process import catch_up, follow_run

        if once or target.is_local:
            asyncio.run(catch_up(settings, every=every))
        else:
            asyncio.run(follow_run(settings, every=every))
