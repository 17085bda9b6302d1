"""The commands about a run that is there: report, follow, evaluate.

DIGENRL_STORE_URL says where the run's store is. Without it, a run that `digenrl up` has left here
is looked for in the folder of all runs, and its store is started for the command.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from shared.errors import UserError

TensorBoardFolder = Annotated[
    Path | None, typer.Option(help="folder of TensorBoard, for a curve of each metric")
]
WandbProject = Annotated[
    str | None, typer.Option(help="project of Weights & Biases; offline with WANDB_MODE=offline")
]
Name = Annotated[str, typer.Argument(metavar="[RUN]", help="name of the run, as --run")]
Run = Annotated[str, typer.Option(envvar="DIGENRL_RUN", help="name of the run")]
Runs = Annotated[Path, typer.Option(help="folder of the runs that `digenrl up` has made")]
RUNS = Path("runs")


def report(
    name: Name = "",
    run: Run = "",
    out: Annotated[
        Path | None,
        typer.Option(help="folder for summary, pictures and adapter; by default the run's"),
    ] = None,
    scheduler: Annotated[str, typer.Option(help="wait for the run behind this API to finish")] = "",
    wall_seconds: Annotated[float, typer.Option(help="how long the run took")] = 0.0,
    runs: Runs = RUNS,
) -> None:
    """Evaluate a run before and after, draw its curves and gallery, export its adapter."""
    from digenrl.local.left import store_of
    from digenrl.report.make import make_report

    wanted = _named(name, run)
    with store_of(runs / wanted):
        making = make_report(
            wanted, out or runs / wanted, scheduler=scheduler, wall_seconds=wall_seconds
        )
        asyncio.run(making)


def follow(
    name: Name = "",
    run: Run = "",
    tensorboard: TensorBoardFolder = None,
    wandb: WandbProject = None,
    once: Annotated[
        bool, typer.Option("--once", help="write the steps that are there, and end")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Write each step's metrics to TensorBoard or Weights & Biases as soon as it is committed."""
    from digenrl.commands.serving import settings_of
    from digenrl.follow.steps import Targets
    from digenrl.follow.steps import follow as follow_run
    from digenrl.local.left import store_of
    from shared.telemetry import configure_logs

    wanted, targets = _named(name, run), Targets(tensorboard, wandb)
    with store_of(runs / wanted) as is_left:
        settings = settings_of(run=wanted)
        configure_logs(service="follow", worker="follow", run=wanted)
        asyncio.run(follow_run(settings, targets, once=once or is_left))


def evaluate(
    name: Name = "",
    run: Run = "",
    once: Annotated[
        bool, typer.Option("--once", help="evaluate what is due by now, then end")
    ] = False,
    every: Annotated[
        int | None, typer.Option(min=1, help="optimizer steps, in place of the recipe's")
    ] = None,
    worker: Annotated[
        str, typer.Option(help="name of this evaluator; by default host and process")
    ] = "",
    nice: Annotated[
        int, typer.Option(min=0, max=19, help="19: only take what others leave of the CPU")
    ] = 0,
    host: Annotated[str, typer.Option(help="address of its HTTP side")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port of its HTTP side; 0 takes a free one")] = 0,
    stay: Annotated[
        bool, typer.Option("--stay", help="outlive a finished run, for when it is resumed")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Evaluate a run's policy versions while it goes on, every so many optimizer steps."""
    from digenrl.commands.serving import evaluate_run, settings_of
    from digenrl.local.left import store_of

    wanted = _named(name, run)
    with store_of(runs / wanted) as is_left:
        settings = settings_of(run=wanted, worker=worker, host=host, port=port, stay=stay or None)
        evaluate_run(settings, once=once or is_left, every=every, nice=nice)


def _named(name: str, run: str) -> str:
    """Raises UserError if neither says which run."""
    if not name and not run:
        raise UserError("--run: say which run; `digenrl up` has left its runs in the folder runs/")
    return name or run
