"""`digenrl plan`: which devices generate, and which train."""

import json
from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands import options
from digenrl.commands.recipe_options import given_keys
from shared.errors import UserError


def plan(
    context: typer.Context,
    recipe: Annotated[
        Path | None,
        typer.Argument(help="recipe with the batch and the schedule", callback=options.recipe_file),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="cost profile; by default the profile of the model's network")
    ] = None,
    variant: options.ProfileVariant = "lora",
    staleness: Annotated[
        int | None, typer.Option(min=0, max=1, help="0 or 1, overrides the recipe")
    ] = None,
    devices: Annotated[str | None, typer.Option(help="GPUs by kind, e.g. h100=16,a100=16")] = None,
    hosts: options.Hosts = None,
    host_memory: options.HostMemory = None,
    host_gpus: options.HostGpus = 8,
    launch_us: options.LaunchUs = None,
    site: Annotated[
        list[str] | None,
        typer.Option(
            help="GPUs at a remote site, e.g. lab:a100=16@100/100,40ms: name, kind, number, Mbit/s "
            "up and down, round-trip time; may be repeated"
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Plan which devices generate and which train, and forecast the speedup."""
    keys = given_keys(context)
    if recipe is None and keys:
        raise UserError(f"--{next(iter(keys))}: a recipe key needs a recipe; name one")
    from digenrl.planning.output import plan_fields, show_plan, wide_console
    from digenrl.planning.plan import plan as find_plan
    from shared.recipe.recipe import load_recipe

    loaded = None if recipe is None else load_recipe(recipe, keys)
    result = find_plan(
        loaded, devices, profile=profile, variant=variant,
        staleness=options.zero_or_one(staleness), host_gpus=host_gpus, hosts=hosts,
        host_memory=host_memory, launch_us=launch_us, sites=tuple(site or ()),
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(plan_fields(result), indent=2))
    else:
        show_plan(result, wide_console())
