"""`digenrl follow`: the metrics of a run as curves, or as lines of JSON."""

import asyncio
from typing import Annotated

import typer

from digenrl.commands import options
from digenrl.local.runs import find_run


def follow(
    name: options.RunArgument = "",
    run: options.RunOption = "",
    tensorboard: options.TensorBoardFolder = None,
    wandb: options.WandbProject = None,
    once: Annotated[
        bool, typer.Option("--once", help="write the steps committed so far, then exit")
    ] = False,
    as_json: options.AsJson = False,
    runs: options.Runs = options.RUNS,
) -> None:
    """Write the metrics of each committed step to TensorBoard or Weights & Biases.

    With --json, print a line for each step, in the format of the API's event `commit`.
    """
    from digenrl.follow.steps import MetricTargets
    from digenrl.follow.steps import follow as follow_run
    from digenrl.local.store import run_store
    from shared.telemetry import configure_logs

    target = find_run(name or run, runs, reads=True)
    targets = MetricTargets(tensorboard, wandb, as_json)
    with run_store(target):
        settings = options.settings_from_options(run=target.id)
        configure_logs(service="follow", worker="follow", run=target.id)
        asyncio.run(follow_run(settings, targets, once=once or target.is_local))
