"""`digenrl follow`: the metrics of a run as curves, or as lines of JSON."""

import asyncio
from typing import Annotated

import typer

from digenrl.commands.options import (
    RUNS,
    AsJson,
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
        bool, typer.Option("--once", help="write the steps committed so far, then exit")
    ] = False,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Write the metrics of each committed step to TensorBoard or Weights & Biases.

    With --json a line is written for each step, as the event `commit` of the API has it.
    """
    from digenrl.follow.steps import Targets
    from digenrl.follow.steps import follow as follow_run
    from digenrl.local.store import store_of
    from shared.telemetry import configure_logs

    wanted, targets = named(name, run), Targets(tensorboard, wandb, as_json)
    with store_of(runs / wanted) as is_left:
        settings = settings_of(run=wanted)
        configure_logs(service="follow", worker="follow", run=wanted)
        asyncio.run(follow_run(settings, targets, once=once or is_left))
