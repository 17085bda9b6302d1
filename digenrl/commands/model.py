"""`digenrl model`: the demo's model, and folders of rewards."""

from pathlib import Path
from typing import Annotated

import typer

from shared.errors import UserError

model = typer.Typer(help="Make the demo's model, or the folder of a reward.", no_args_is_help=True)


@model.command()
def digits(
    folder: Annotated[Path, typer.Option(help="where the diffusers folder goes")] = Path(
        "models/digits"
    ),
    rewards: Annotated[Path, typer.Option(help="where the judges go")] = Path(
        "models/digits-rewards"
    ),
    seed: Annotated[int, typer.Option(help="of everything that is random")] = 0,
) -> None:
    """Train the demo's generator and its judges from scikit-learn's digits."""
    from digenrl.digits.build import build_model

    build_model(folder, rewards, seed=seed, report=typer.echo)


@model.command()
def reward(
    reward: Annotated[str, typer.Argument(help="aesthetic, hpsv2 or image-reward")],
    weights: Annotated[Path, typer.Argument(help="the file that its authors publish")],
    like: Annotated[
        Path, typer.Option(help="its CLIP as transformers has it; of image-reward, its tokenizer")
    ],
    out: Annotated[Path, typer.Option(help="folder to make, for the recipe to name")],
) -> None:
    """Make the folder of a reward from its published weights."""
    from digenrl.commands.reward_weights import Reward, make_folder

    if reward not in list(Reward):
        raise UserError(f"REWARD: {reward!r}; known are: {', '.join(Reward)}")
    make_folder(Reward(reward), weights, like, out)
