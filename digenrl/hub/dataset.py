"""Fetches the files of a data set's split from the hub, and makes a file of prompts of them."""

import posixpath
import shutil
from collections.abc import Callable
from pathlib import Path

from digenrl.hub.answers import check_installed, endpoint, explained
from digenrl.hub.fetch import Download, Say, alone, check_space, name_commit
from shared.errors import UserError
from shared.learning.dataset_rows import make_prompts
from shared.learning.hub_datasets import chosen_files
from shared.messages.records import MAX_TEXT
from shared.models.hub import MAIN
from shared.recipe.dataset import Dataset

PAGES = "datasets/"
"""Folder of the hub's pages of data sets."""


def fetch_prompts(dataset: Dataset, key: str, say: Say) -> Path:
    """Fetch what is not here yet of a data set's split. Returns the file of its prompts.

    Args:
        key: table of the recipe, for errors.

    Raises:
        UserError: if there is no such data set, revision, configuration, split or column, or if it
            is gated, or larger than the disk.
        Unavailable: if the hub does not answer, or breaks off more often than is tried again.
    """
    check_installed()
    with explained(dataset.id, dataset.revision, key=f"{key}.id", folder=PAGES):
        from huggingface_hub import HfApi

        info = HfApi(endpoint=endpoint()).dataset_info(
            dataset.id, revision=dataset.revision, files_metadata=True
        )
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    configs = getattr(info.card_data, "configs", None) or ()
    try:
        names = chosen_files([*sizes], configs, dataset.config, dataset.split)
    except UserError as error:
        raise UserError(f"{key}.{error} ({dataset.id})") from error
    place = dataset.storage
    download = Download(dataset.id, str(info.sha), place, sizes, kind="dataset")
    with alone(place, say):
        _get(download, names, key, say)
        file = dataset.file(download.commit)
        if not file.is_file():
            _make(dataset, download, names, key, say)
        name_commit(place, dataset.revision or MAIN, download.commit)
    return file


def _get(download: Download, names: list[str], key: str, say: Say) -> None:
    with explained(download.model, key=f"{key}.id", folder=PAGES):
        check_space(download, names, say)
        download.get(names)


def _make(dataset: Dataset, download: Download, names: list[str], key: str, say: Say) -> None:
    folder = dataset.file(download.commit).parent
    unfinished = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    files = [(download.folder / name, _images_beside(download, name, key)) for name in names]
    made = make_prompts(files, dataset.columns, unfinished, key)
    unfinished.rename(folder)
    say(f"{dataset.id}: {made.prompts} prompts of the split {dataset.split}")
    if made.empty_rows:
        say(f"left out: {made.empty_rows} rows without a prompt, or without an image")
    if made.long_rows:
        say(f"left out: {made.long_rows} rows whose prompt has more than {MAX_TEXT} characters")
    if made.left_out:
        say(f"left out, neither text, number nor bool: {', '.join(sorted(made.left_out))}")


def _images_beside(download: Download, rows: str, key: str) -> Callable[[str], bytes]:
    """Return what fetches an image that a row of the file ``rows`` names."""

    def read(path: str) -> bytes:
        name = posixpath.normpath(posixpath.join(posixpath.dirname(rows), path))
        if name not in download.sizes:
            raise UserError(
                f"{key}.image: {download.model} has no file {path!r}, which {rows} names; name a "
                "column that holds images, or their paths relative to that file"
            )
        with explained(download.model, key=f"{key}.id", folder=PAGES):
            download.get([name])
        return (download.folder / name).read_bytes()

    return read
