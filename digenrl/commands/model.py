"""`digenrl model`: folders of rewards."""

from pathlib import Path
from typing import Annotated

import typer

from shared.errors import UserError

model = typer.Typer(no_args_is_help=True)


@model.callback()
def folders() -> None:
    """Build the folder of a reward."""


@model.command()
def reward(
    reward: Annotated[str, typer.Argument(help="name of the reward, such as hpsv2")],
    weights: Annotated[Path, typer.Argument(help="published weights file")],
    like: Annotated[
        Path,
        typer.Option(
            help="its CLIP or Qwen2-VL in transformers format; for image-reward, its tokenizer"
        ),
    ],
    out: Annotated[Path, typer.Option(help="folder to create, which recipes can name")],
) -> None:
    """Convert the published weights of a reward into a folder that recipes can name."""
    from digenrl.hub.reward_weights import REWARDS, make_folder

    if reward not in REWARDS:
        raise UserError(f"REWARD: {reward!r}; known are: {', '.join(REWARDS)}")
    make_folder(reward, weights, like, out)
