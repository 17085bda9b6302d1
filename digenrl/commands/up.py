"""`digenrl up`: a whole run on this machine."""

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer

from digenrl.commands import options
from digenrl.commands.recipe_options import given_keys
from shared.errors import UserError


def up(
    context: typer.Context,
    recipe: options.RecipeFile,
    steps: Annotated[int | None, typer.Option(help="optimizer steps, overrides the recipe")] = None,
    seed: Annotated[int | None, typer.Option(help="seed, overrides the recipe")] = None,
    run: Annotated[
        str, typer.Option(help="name of the run, overrides the recipe; or an earlier run's folder")
    ] = "",
    deterministic: Annotated[
        bool | None, typer.Option(help="the same seed gives the same bytes")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="disaggregated, fluid, colocated, or sequential")
    ] = None,
    tag: Annotated[
        str | None, typer.Option(help="auto, off, or how many groups the trainer generates at most")
    ] = None,
    staleness: Annotated[
        str | None, typer.Option(help="0, or 1 to begin the next batch before the step")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue from the run's newest commit")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="begin another run; an earlier one keeps its results")
    ] = False,
    in_background: Annotated[
        bool,
        typer.Option("--detach", help="return once it is in progress; it outlives the session"),
    ] = False,
    port: Annotated[
        int,
        typer.Option(
            max=options.MAX_PORT, min=0, help="port of the scheduler's API; 0: a free one"
        ),
    ] = 0,
    runs: options.Runs = options.RUNS,
    tensorboard: options.TensorBoardFolder = None,
    wandb: options.WandbProject = None,
    as_json: options.AsJson = False,
) -> None:
    """Run a recipe on this machine: brokers, services and report, without Docker.

    With --json stdout gets a line after each change, with the API's view of the run, as `digenrl
    watch --json` writes it; everything else goes to stderr.
    """
    from digenrl.follow.steps import MetricTargets
    from digenrl.local.checking.preflight import UpRequest, prepare
    from digenrl.local.running.detach import detach, hints
    from digenrl.local.up import run_locally

    if resume and fresh:
        raise UserError("--fresh: not together with --resume")
    keys = given_keys(
        context,
        run__steps=steps,
        run__seed=seed,
        trainer__deterministic=deterministic,
        rollout__workers=_rollout_workers(given_keys(context), mode),
        schedule__mode=mode,
        schedule__tag=_number(tag),
        schedule__max_staleness=_number(staleness),
    )
    request = UpRequest(
        recipe, keys, resume=resume, fresh=fresh, port=port, runs=runs.resolve(), run=run,
        targets=MetricTargets(tensorboard, wandb), typed=sys.argv,
        say=partial(typer.echo, err=as_json),
    )  # fmt: skip
    local = prepare(request)
    if in_background and (process := detach(local)):
        for line in hints(local, process):
            typer.echo(line)
        return
    raise typer.Exit(asyncio.run(run_locally(local, as_json=as_json)))


def _rollout_workers(given: Mapping[str, Any], mode: str | None) -> int | None:
    """Return 0 in modes in which members generate anyway, unless workers are requested."""
    is_needless = mode in ("colocated", "fluid") and "rollout.workers" not in given
    return 0 if is_needless else None


def _number(text: str | None) -> str | int | float | None:
    """Return a number if the text is one; the recipe checks any other word."""
    if text is None:
        return None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
