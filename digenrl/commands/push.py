"""`digenrl push`: a run's adapter with its model card, to the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands.options import RUNS, Runs
from digenrl.local.runs import run_in_folder
from shared.errors import UserError

CARD = "README.md"
PUSHED_FILES = ("*.safetensors", "*.json", "*.png", "*.mp4", CARD)
"""Files of an adapter's folder that are pushed."""


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

    from shared.models.hub import ID_PATTERN

    if re.fullmatch(ID_PATTERN, repository) is None:
        raise UserError(f"REPOSITORY: {repository!r} is not org/name")
    local_run = run_in_folder(what, runs)
    adapter = (runs / what if local_run is None else local_run.folder) / "adapter"
    folder = adapter if adapter.is_dir() else Path(what)
    typer.echo(push_folder(folder, repository, private=private, message=message))


def push_folder(folder: Path, repository: str, *, private: bool, message: str) -> str:
    """Push the exported adapter of a run; make the repository if it does not exist. Returns its
    address.

    Raises:
        UserError: if the folder holds no adapter with a card, or the hub refuses the token.
        Unavailable: if the hub does not respond, or the connection breaks.
    """
    from digenrl.hub.answers import check_installed, endpoint, explained

    check_installed()
    if not (folder / CARD).is_file() or not list(folder.glob("*.safetensors")):
        raise UserError(
            f"{folder}: holds no adapter with its card ({CARD}); `digenrl report` writes both"
        )
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise UserError(f"HF_TOKEN: set it to a token that may write to {repository}")
    hub = HfApi(endpoint=endpoint())
    with explained(repository, key="REPOSITORY"):
        hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(
            repo_id=repository, folder_path=folder, allow_patterns=list(PUSHED_FILES),
            commit_message=message,
        )  # fmt: skip
    return f"{endpoint()}/{repository}"
