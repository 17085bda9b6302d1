"""`digenrl generate`: samples from a recipe's model."""

from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands.options import RecipeFile
from digenrl.commands.recipe_options import given_keys


def generate(
    context: typer.Context,
    recipe: RecipeFile,
    prompt: Annotated[list[str], typer.Option(help="prompt to sample; may be given several times")],
    out: Annotated[Path, typer.Option(help="output folder")],
    adapter: Annotated[
        Path | None, typer.Option(help="an exported adapter; without it, the base model")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="image that a prompt edits: one for all prompts, or one for each"),
    ] = None,
    num: Annotated[int, typer.Option(min=1, max=1024, help="samples per prompt")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="seed of the noise")] = 0,
) -> None:
    """Generate images or videos with a recipe's model and a trained adapter."""
    from shared.process.worker_process import prepare_libraries
    from shared.recipe.recipe import load_recipe
    from shared.telemetry import quiet_logs

    quiet_logs()
    loaded = load_recipe(recipe, given_keys(context))
    prepare_libraries(loaded, threads=loaded.rollout.threads)
    from digenrl.report.generate import generate as make

    for path in make(loaded, adapter, prompt, images=image or (), num_each=num, seed=seed, out=out):
        typer.echo(path)
