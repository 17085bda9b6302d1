"""`digenrl rewards` and `digenrl reward try`: available scorers, and a trial of the user's own
reward function on images, before a run."""

from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands.options import AsJson
from shared.errors import ScoringError

reward = typer.Typer(no_args_is_help=True, help="Rewards of your own.", rich_markup_mode=None)


def rewards(as_json: AsJson = False) -> None:
    """List the types of scorers that a recipe may name, and the packages that bring them."""
    from digenrl.local.checking.available import listed_rewards, shown

    typer.echo(shown(listed_rewards(), as_json=as_json))


@reward.callback()
def reward_group() -> None:
    """Rewards of your own."""


@reward.command("try")
def try_reward(
    source: Annotated[
        str, typer.Argument(metavar="FILE", help="my_reward.py, or my_reward.py:score")
    ],
    images: Annotated[Path, typer.Option(help="folder with images; a folder in it is a video")],
    prompts: Annotated[
        Path | None,
        typer.Option(help="file with prompts, a line for each image or one line for all"),
    ] = None,
    patience: Annotated[float, typer.Option(min=0.01, help="seconds for a call")] = 120.0,
    groups: Annotated[
        bool, typer.Option("--groups", help='as with scores = "groups" in a recipe')
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Score images with a function of your own, just as a run would; exits with 1 if it could not
    score all of them."""
    from digenrl.local.checking.reward_trial import as_lines, try_file
    from shared.telemetry import quiet_logs

    quiet_logs()
    trial = try_file(source, images, prompts, patience=patience, groups=groups)
    typer.echo(trial.model_dump_json(indent=1) if as_json else "\n".join(as_lines(trial)))
    if trial.failed:
        raise ScoringError(f"{trial.failed} of {len(trial.scores)} samples have no score")
