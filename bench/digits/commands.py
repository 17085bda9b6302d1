"""`python -m bench digits` and `digits-edit`: the models of the demo, trained again."""

from pathlib import Path
from typing import Annotated

import typer


def digits(
    folder: Annotated[
        Path, typer.Option(help="output folder of the model, in diffusers format")
    ] = Path("models/digits"),
    rewards: Annotated[Path, typer.Option(help="output folder of the reward classifiers")] = Path(
        "models/digits-rewards"
    ),
    seed: Annotated[int, typer.Option(help="seed of all random numbers")] = 0,
) -> None:
    """Train the demo's generator and its reward classifiers on scikit-learn's digits."""
    from bench.digits.build import build_model

    build_model(folder, rewards, seed=seed, report=typer.echo)


def digits_edit(
    folder: Annotated[
        Path, typer.Option(help="output folder of the model, in diffusers format")
    ] = Path("models/digits-edit"),
    prompts: Annotated[
        Path, typer.Option(help="output folder of the prompts and their source images")
    ] = Path("recipes/digits-edit"),
    seed: Annotated[int, typer.Option(help="seed of all random numbers")] = 0,
) -> None:
    """Train the editing demo's model on scikit-learn's digits, and write its prompts."""
    from bench.digits.editing import build_edit_model, write_prompts

    write_prompts(prompts, trained=60, held_out=20)
    build_edit_model(folder, seed=seed, report=typer.echo)
