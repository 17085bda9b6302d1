"""`digenrl follow`: a run's metrics as curves."""

import asyncio
from typing import Annotated

import typer

from digenrl.commands.options import (
    RUNS,
    RunArgument,
    RunOption,
    Runs,
    TensorBoardFolder,
    WandbProject,
    named,
    settings_of,
)


def follow(
    name: RunArgument = "",
    run: RunOption = "",
    tensorboard: TensorBoardFolder = None,
    wandb: WandbProject = None,
    once: Annotated[
        bool, typer.Option("--once", help="write the steps that are there, and end")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Write each step's metrics to TensorBoard or Weights & Biases as soon as it is committed."""
    from digenrl.follow.steps import Targets
    from digenrl.follow.steps import follow as follow_run
    from digenrl.local.store import store_of
    from shared.telemetry import configure_logs

    wanted, targets = named(name, run), Targets(tensorboard, wandb)
    with store_of(runs / wanted) as is_left:
        settings = settings_of(run=wanted)
        configure_logs(service="follow", worker="follow", run=wanted)
        asyncio.run(follow_run(settings, targets, once=once or is_left))
