"""`digenrl check`: whether a recipe can run."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands.options import AsJson, HostGpus, HostMemory, Hosts, LaunchUs, RecipeFile
from digenrl.commands.recipe_options import given_keys
from shared.errors import UserError


def check(
    context: typer.Context,
    recipe: RecipeFile,
    devices: Annotated[
        str | None, typer.Option(help="kind=count, e.g. h100=8: forecast the run on these devices")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="cost profile; by default the profile of the model's network")
    ] = None,
    hosts: Hosts = None,
    host_memory: HostMemory = None,
    host_gpus: HostGpus = 8,
    streamed: Annotated[
        str | None,
        typer.Option(
            help="kinds of GPUs that stream the network (DIGENRL_ROLLOUT_MEMORY=streamed)"
        ),
    ] = None,
    elsewhere: Annotated[
        bool, typer.Option("--elsewhere", help="skip model and rewards, which are on other hosts")
    ] = False,
    traced: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="trace memory, arithmetic and storage by a run of the model on tensors without "
            "values; takes a minute or two, and needs no weights and no GPU",
        ),
    ] = False,
    save_profile: Annotated[
        Path | None, typer.Option(help="with --trace: write a cost profile for plan and --profile")
    ] = None,
    launch_us: LaunchUs = None,
    as_json: AsJson = False,
) -> None:
    """Check whether a recipe can run, without starting anything."""
    from digenrl.local.checking.check import check as check_recipe

    if save_profile is not None and not traced:
        raise UserError("--save-profile: a cost profile needs a trace; add --trace")
    try:
        checked = check_recipe(
            recipe, devices, profile, options=given_keys(context), hosts=hosts, host_gpus=host_gpus,
            host_memory=host_memory, streamed=streamed,
            elsewhere=elsewhere, traced=traced, for_profile=save_profile is not None,
            launch_us=launch_us, say=partial(typer.echo, err=True),
        )  # fmt: skip
    except UserError as error:
        if as_json:
            result = {"recipe": str(recipe), "ok": False, "error": str(error)}
            typer.echo(json.dumps(result, indent=2))
        raise
    if save_profile is not None:
        from digenrl.trace.profile import traced_profile, write_profile

        assert checked.trace is not None
        cost_profile = traced_profile(checked.recipe, checked.trace, name=save_profile.stem)
        write_profile(cost_profile, save_profile)
        typer.echo(f"cost profile: {save_profile}", err=True)
    typer.echo(checked.as_json if as_json else "\n".join(checked.lines))
    if not checked.verdict.can_run:
        raise UserError(checked.verdict.sentence)
    if not as_json:
        typer.echo(checked.verdict.sentence)
