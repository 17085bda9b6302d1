"""`digenrl init`: the first recipe for a model, prompts and a reward of one's own."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands.recipe_options import given_keys


def init(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="folder of a diffusers model, or ORG/NAME on the hub")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="file with prompts, or a prompt; may be given several times"),
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            help="my_reward.py:score, a type that `digenrl rewards` lists, or TYPE=FOLDER; may be "
            "given several times"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="recipe to write")] = Path("mine.toml"),
    sampled: Annotated[
        bool, typer.Option("--samples/--no-samples", help="show four samples with their rewards")
    ] = True,
) -> None:
    """Write a recipe for your model, prompts and reward that fits this machine, and show four
    samples with their rewards before anything is trained.

    On a terminal, it asks for what is missing. It lists all errors at once.
    """
    from digenrl.local.first_recipe import InitRequest
    from digenrl.local.first_run import first_run
    from shared.telemetry import quiet_logs

    quiet_logs()
    if sys.stdin.isatty():
        model = model or typer.prompt("model (folder, or ORG/NAME on the hub)")
        prompts = prompts or [typer.prompt("prompts (file, or one prompt)")]
        reward = reward or [typer.prompt("reward (my_reward.py:score, or a type)")]
    request = InitRequest(model or "", prompts or (), reward or (), out, given_keys(context))
    for line in first_run(request, sampled=sampled, say=lambda line: typer.echo(line, err=True)):
        typer.echo(line)
