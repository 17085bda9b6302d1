"""`digenrl reproduce`: a run once more, from its record."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands.options import RUNS, RunName, Runs
from digenrl.commands.recipe_options import given_keys
from digenrl.local.runs import find_run


def reproduce(
    context: typer.Context,
    run: RunName,
    other: Annotated[
        str | None, typer.Option("--with", help="a run to compare with, in place of a new one")
    ] = None,
    runs: Runs = RUNS,
) -> None:
    """Start a run once more from its record, and report the step and the cause of the first
    difference."""
    from digenrl.local.reproduce import read_record, verdict

    first = read_record(find_run(run, runs))
    if other is None:
        other = f"{first.recipe.run.name[:57]}-again"
        options = {"run.name": other, **given_keys(context)}
        if code := _start(first.run.folder / "recipe.json", options, runs):
            raise typer.Exit(code)
    same, lines = verdict(first, read_record(find_run(other, runs)))
    for line in lines:
        typer.echo(line)
    raise typer.Exit(0 if same else 1)


def _start(recipe: Path, options: dict[str, object], runs: Path) -> int:
    from digenrl.local.checking.preflight import UpRequest, prepare
    from digenrl.local.up import run_locally

    local = prepare(
        UpRequest(recipe, options, resume=False, fresh=True, port=0, runs=runs.resolve())
    )
    with local.lock:
        return asyncio.run(run_locally(local))
