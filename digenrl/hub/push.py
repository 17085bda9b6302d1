"""Pushes an exported adapter with its model card to the hub."""

from pathlib import Path

from digenrl.hub.answers import check_installed, endpoint, explained
from shared.errors import UserError

CARD = "README.md"
PUSHED_FILES = ("*.safetensors", "*.json", "*.png", "*.mp4", CARD)
"""Files of an adapter's folder that are pushed."""


def push(folder: Path, repository: str, *, private: bool, message: str) -> str:
    """Push the exported adapter of a run; make the repository if it does not exist. Returns its
    address.

    Raises:
        UserError: if the folder holds no adapter with a card, or the hub refuses the token.
        Unavailable: if the hub does not respond, or the connection breaks.
    """
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
