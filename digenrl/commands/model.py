"""`digenrl model`: converts the weights of a reward's network."""

from pathlib import Path
from typing import Annotated

import typer

from shared.errors import UserError

model = typer.Typer(no_args_is_help=True)


@model.callback()
def folders() -> None:
    """Convert published weights of rewards."""


@model.command()
def reward(
    reward: Annotated[str, typer.Argument(help="name of the reward, such as hpsv2")],
    weights: Annotated[Path, typer.Argument(help="published weights file")],
    like: Annotated[
        Path,
        typer.Option(
            help="folder with the base model (CLIP or Qwen2-VL) in transformers format; for "
            "image-reward, with the tokenizer"
        ),
    ],
    out: Annotated[Path, typer.Option(help="folder to create, which recipes can name")],
) -> None:
    """Convert the published weights of a reward into a folder that recipes can name."""
    from digenrl.hub.reward_weights import REWARDS, make_folder

    if reward not in REWARDS:
        raise UserError(f"REWARD: {reward!r} is unknown; choose one of {', '.join(REWARDS)}")
    make_folder(reward, weights, like, out)
