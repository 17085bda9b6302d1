"""`digenrl model`: the demo's model, and folders of rewards."""

from pathlib import Path
from typing import Annotated

import typer

from shared.errors import UserError

model = typer.Typer(help="Build the demo's model, or the folder of a reward.", no_args_is_help=True)


@model.command()
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
    from digenrl.digits.build import build_model

    build_model(folder, rewards, seed=seed, report=typer.echo)


@model.command("digits-edit")
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
    from digenrl.digits.editing import build_edit_model, write_prompts

    write_prompts(prompts, trained=60, held_out=20)
    build_edit_model(folder, seed=seed, report=typer.echo)


@model.command()
def reward(
    reward: Annotated[str, typer.Argument(help="aesthetic, hpsv2 or image-reward")],
    weights: Annotated[Path, typer.Argument(help="published weights file")],
    like: Annotated[
        Path, typer.Option(help="its CLIP in transformers format; for image-reward, its tokenizer")
    ],
    out: Annotated[Path, typer.Option(help="folder to create, which recipes can name")],
) -> None:
    """Convert the published weights of a reward into a folder that recipes can name."""
    from digenrl.commands.reward_weights import Reward, make_folder

    if reward not in list(Reward):
        raise UserError(f"REWARD: {reward!r}; known are: {', '.join(Reward)}")
    make_folder(Reward(reward), weights, like, out)
