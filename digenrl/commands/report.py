"""`digenrl report`: what a run has achieved.

DIGENRL_STORE_URL names the run's object store. If it is not set, the command looks for the run in
the folder of all runs of `digenrl up` and starts its store; `follow` and `evaluate` do the same.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from digenrl.commands.options import RUNS, AsJson, RunArgument, RunOption, Runs
from digenrl.local.runs import RECIPE_JSON, Run, find_run

if TYPE_CHECKING:
    from shared.recipe.recipe import Recipe

EXIT_INCOMPLETE = 3


def report(
    name: RunArgument = "",
    run: RunOption = "",
    out: Annotated[
        Path | None,
        typer.Option(help="folder for summary, pictures and adapter; by default the run's folder"),
    ] = None,
    scheduler: Annotated[
        str, typer.Option(help="scheduler's API; wait for its run to finish")
    ] = "",
    wall_seconds: Annotated[float, typer.Option(help="duration of the run, for the summary")] = 0.0,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Evaluate a run's first and last version, draw curves and a gallery, export the adapter.

    With --json, what summary.json has is written to stdout, and everything else to stderr. Ends
    with 3 if a part of the report has failed; the adapter is exported before the others.
    """
    from digenrl.local.running.display import make_console
    from digenrl.local.store import run_store
    from digenrl.report.make import make_report
    from shared.telemetry import quiet_logs

    quiet_logs()
    target = find_run(name or run, runs, reads=True)
    with run_store(target):
        making = make_report(
            target.id, out or target.folder, scheduler=scheduler, wall_seconds=wall_seconds,
            console=make_console(stderr=as_json),
        )  # fmt: skip
        summary, recipe = asyncio.run(making)
    if as_json:
        typer.echo(summary.model_dump_json(indent=1))
    if out is not None and (out / RECIPE_JSON).is_file():  # `digenrl up` asked
        target = replace(target, folder=out, is_local=True)
    if summary.failures:
        again = target.command("report")
        typer.echo(f"the report is not whole, the run is; repeat it: {again}", err=as_json)
        raise typer.Exit(EXIT_INCOMPLETE)
    typer.echo("\n".join(_next_steps(target, recipe)), err=as_json)


def _next_steps(run: Run, recipe: "Recipe") -> list[str]:
    from digenrl.report.export_run import example_prompt

    lines = [
        f"its page:        {run.command('view')}",
        f"samples:         {run.command('generate', *example_prompt(recipe))}",
    ]
    if recipe.model.trained == "full":
        return lines
    return [*lines, f"for other tools: {run.command('export', '--layout', 'diffusers')}"]
