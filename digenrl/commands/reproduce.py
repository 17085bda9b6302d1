"""`digenrl reproduce`: a run once more, from its record."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands.options import RUNS, Runs
from digenrl.commands.recipe_options import given_keys


def reproduce(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="folder of a run, such as runs/digits")],
    other: Annotated[
        Path | None, typer.Option("--with", help="a run to compare with, in place of a new one")
    ] = None,
    runs: Runs = RUNS,
) -> None:
    """Start a run once more from its record, and say at which step and why it first differs."""
    from digenrl.local.reproduce import record_of, verdict

    first = record_of(run)
    if other is None:
        name = f"{first.recipe.run.name[:57]}-again"
        other = runs / name
        options = {"run.name": name, **given_keys(context)}
        if code := _start(run / "recipe.json", options, runs):
            raise typer.Exit(code)
    same, lines = verdict(first, record_of(other))
    for line in lines:
        typer.echo(line)
    raise typer.Exit(0 if same else 1)


def _start(recipe: Path, options: dict[str, object], runs: Path) -> int:
    from digenrl.local.preflight import Request, prepare
    from digenrl.local.up import run_locally

    local = prepare(Request(recipe, options, resume=False, port=0, runs=runs.resolve()))
    with local.lock:
        return asyncio.run(run_locally(local))
