"""`digenrl push`: a run's adapter with its model card, to the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands.options import RUNS, Runs
from digenrl.local.runs import run_in_folder
from shared.errors import UserError


def push(
    what: Annotated[
        str, typer.Argument(help="a run's name or folder, or a folder with an adapter")
    ],
    repository: Annotated[str, typer.Argument(help="repository on the hub: org/name")],
    private: Annotated[
        bool, typer.Option("--private", help="make a new repository private")
    ] = False,
    message: Annotated[str, typer.Option(help="message of the commit")] = "Adapter by DigenRL",
    runs: Runs = RUNS,
) -> None:
    """Push an adapter and its model card to the hub, as the account of HF_TOKEN."""
    import re

    from digenrl.hub.push import push as push_folder
    from shared.models.hub import ID_PATTERN

    if re.fullmatch(ID_PATTERN, repository) is None:
        raise UserError(f"REPOSITORY: {repository!r} is not org/name")
    found = run_in_folder(what, runs)
    adapter = (runs / what if found is None else found.folder) / "adapter"
    folder = adapter if adapter.is_dir() else Path(what)
    typer.echo(push_folder(folder, repository, private=private, message=message))
