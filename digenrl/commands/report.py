"""`digenrl report`: what a run has achieved.

DIGENRL_STORE_URL says where the run's store is. Without it, a run that `digenrl up` has left here
is looked for in the folder of all runs, and its store is started for the command; so it is for
`follow` and `evaluate`.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands.options import RUNS, RunArgument, RunOption, Runs, named


def report(
    name: RunArgument = "",
    run: RunOption = "",
    out: Annotated[
        Path | None,
        typer.Option(help="folder for summary, pictures and adapter; by default the run's"),
    ] = None,
    scheduler: Annotated[str, typer.Option(help="wait for the run behind this API to finish")] = "",
    wall_seconds: Annotated[float, typer.Option(help="how long the run took")] = 0.0,
    runs: Runs = RUNS,
) -> None:
    """Evaluate a run before and after, draw its curves and gallery, export its adapter."""
    from digenrl.local.store import store_of
    from digenrl.report.make import make_report

    wanted = named(name, run)
    with store_of(runs / wanted):
        making = make_report(
            wanted, out or runs / wanted, scheduler=scheduler, wall_seconds=wall_seconds
        )
        asyncio.run(making)
