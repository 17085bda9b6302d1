"""`digenrl generate`: samples from the model of a run, or of a recipe."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from digenrl.commands.export import parse_version
from digenrl.commands.options import RUN_HELP, RUNS, Runs
from digenrl.commands.recipe_options import given_keys
from digenrl.local.runs import find_run
from shared.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from shared.recipe.recipe import Recipe
    from shared.store import ObjectStore

BASE, OUT = "base", "samples"


def generate(
    context: typer.Context,
    what: Annotated[str, typer.Argument(metavar="RUN", help=f"{RUN_HELP}; or a recipe file")],
    prompt: Annotated[list[str], typer.Option(help="prompt to sample; may be given several times")],
    out: Annotated[
        Path | None, typer.Option(help=f"output folder; default {OUT}, in the run's folder")
    ] = None,
    version: Annotated[
        str, typer.Option(help="version: a number, newest, best, or base for the base model")
    ] = "",
    adapter: Annotated[
        Path | None,
        typer.Option(help="an exported adapter; a recipe without it has the base model"),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="image that a prompt edits: one for all prompts, or one for each"),
    ] = None,
    num: Annotated[int, typer.Option(min=1, max=1024, help="samples per prompt")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="seed of the noise")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON lines: steps as they are done, then rewards")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Generate images or videos with the model of a run, at any of its versions, or of a recipe.

    Examples: `digenrl generate demo --prompt "a red car"`, `digenrl generate demo --version base
    --prompt "a red car"`. The run's recipe has the model and all settings; keys override them.
    """
    from digenrl.local.store import run_store
    from shared.process.worker_process import prepare_libraries
    from shared.recipe.files import located
    from shared.recipe.recipe import load_recipe
    from shared.telemetry import quiet_logs

    quiet_logs()
    if adapter is not None and version:
        raise UserError("--version: not together with --adapter, which has weights of its own")
    keys, folder = given_keys(context), Path(OUT)
    weights: Path | dict[str, Tensor] | None = adapter
    if what.endswith((".toml", ".json")):
        if version:
            raise UserError("--version: a recipe has no versions; name a run, or an --adapter")
        recipe = load_recipe(located(Path(what)), keys)
    else:
        run = find_run(what, runs, reads=True)
        with run_store(run, reads=True) as store:
            wanted = BASE if adapter else version or "newest"
            recipe, stored = asyncio.run(_from_run(store, run.id, wanted, keys))
        weights, folder = adapter or stored, run.folder / OUT
    prepare_libraries(recipe, threads=recipe.rollout.threads)
    from digenrl.report.generate import generate as make

    follow = (lambda told: typer.echo(json.dumps(told))) if as_json else None
    files = make(
        recipe, weights, prompt, images=image or (), num_each=num, seed=seed, out=out or folder,
        follow=follow,
    )  # fmt: skip
    for path in files:
        typer.echo(json.dumps({"file": str(path)}) if as_json else path)


async def _from_run(
    store: "ObjectStore", run: str, version: str, keys: Mapping[str, Any]
) -> "tuple[Recipe, dict[str, Tensor] | None]":
    """Return the recipe of a run with these keys, and the weights of a version."""
    from digenrl.report.export_run import read_version
    from shared.recipe.files import RecipeLayer
    from shared.recipe.recipe import resolve
    from shared.run.run_recipe import needed_recipe

    path, weights = Path("recipe.json"), None
    recipe = await needed_recipe(store, run)
    if version != BASE:
        _, weights = await read_version(store, recipe, parse_version(version))
    return resolve(path, [RecipeLayer(path, recipe.model_dump(mode="json"))], keys), weights
