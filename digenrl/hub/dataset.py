"""Fetches the files of a data set's split from the hub, or takes files of this host, and makes a
file of prompts of them."""

import hashlib
import posixpath
import shutil
from collections.abc import Callable
from pathlib import Path

from digenrl.hub.answers import check_installed, endpoint, explained
from digenrl.hub.fetch import Download, ShowLine, alone, check_space, name_commit
from shared.errors import UserError
from shared.learning.dataset_rows import ConversionCounts, UnreadableError, make_prompts
from shared.learning.hub_datasets import PROMPTS_FILE, chosen_files
from shared.learning.own_files import files_digest, note_conversion, split_files
from shared.limits import MAX_TEXT
from shared.models.hub import MAIN
from shared.recipe.dataset import Dataset
from shared.recipe.recipe import Recipe

PAGES = "datasets/"
"""Folder of the hub's pages of data sets."""


def fetch_prompts(dataset: Dataset, key: str, say: ShowLine) -> Path:
    """Fetch what is not here yet of a data set's split, or make it of files of this host. Returns
    the file of its prompts.

    Args:
        key: table of the recipe, for errors.

    Raises:
        UserError: if there is no such data set, revision, configuration, split or column, or if
            it
            is gated, or larger than the disk.
        Unavailable: if the hub does not respond, or the connection breaks after all retries.
    """
    if dataset.folder is not None:
        return convert_files(dataset, dataset.folder, key, say)
    assert dataset.id is not None
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


def _get(download: Download, names: list[str], key: str, say: ShowLine) -> None:
    with explained(download.model, key=f"{key}.id", folder=PAGES):
        check_space(download, names, say)
        download.get(names)


def _make(dataset: Dataset, download: Download, names: list[str], key: str, say: ShowLine) -> None:
    folder = dataset.file(download.commit).parent
    unfinished = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    files = [(download.folder / name, _images_beside(download, name, key)) for name in names]
    counts = make_prompts(files, dataset.columns, unfinished, key)
    unfinished.rename(folder)
    _tell(f"{dataset.id}: {counts.prompts} prompts of the split {dataset.split}", counts, say)


def convert_files(dataset: Dataset, source: Path, key: str, say: ShowLine) -> Path:
    """Make prompts of files of this host, unless they are made. Returns the file of the prompts.

    Raises:
        UserError: as `fetch_prompts` does.
    """
    try:
        root, names = split_files(source, dataset.config, dataset.split)
    except UserError as error:
        raise UserError(f"{key}.{error}") from error
    here = dataset.model_copy(update={"revision": None})
    with alone(here.storage, say):
        if (revision := here.commit) is None:
            revision = _convert_files(here, source, [(root, name) for name in names], key, say)
    if dataset.revision not in (None, revision):
        raise UserError(
            f"{key}.revision: the prompts of {source} have the digest {revision} now, not "
            f"{dataset.revision}; leave the revision out to take them as they are"
        )
    return here.file(revision)


def _convert_files(
    dataset: Dataset, source: Path, rows: list[tuple[Path, str]], key: str, say: ShowLine
) -> str:
    """Return the digest of the prompts that were made."""
    state, unfinished = files_digest(source), dataset.storage / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    files = [(root / name, _images_below(root, name, key)) for root, name in rows]
    try:
        counts = make_prompts(files, dataset.columns, unfinished, key)
    except UnreadableError as error:
        remedy = "correct the file, or move it away"
        raise UserError(f"{key}.folder: {error.reason}; {remedy}") from error
    digest = hashlib.sha256((unfinished / PROMPTS_FILE).read_bytes()).hexdigest()[:40]
    folder = dataset.file(digest).parent
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished.rename(folder)
    note_conversion(dataset.storage, source, dataset.selection, digest, state)
    _tell(f"{source}: {counts.prompts} prompts", counts, say)
    return digest


def make_own_prompts(recipe: Recipe, say: ShowLine) -> bool:
    """Make the prompts of a recipe's own files that are not made yet; returns whether some were, so
    that the recipe is to be read again.

    Raises:
        UserError: as `fetch_prompts` does.
    """
    has_prompts = False
    named = {"data": recipe.data.dataset, "evaluation": recipe.evaluation.dataset}
    for table, dataset in named.items():
        if dataset is not None and dataset.folder is not None and dataset.commit is None:
            convert_files(dataset, dataset.folder, f"{table}.dataset", say)
            has_prompts = True
    return has_prompts


def _tell(what: str, counts: ConversionCounts, say: ShowLine) -> None:
    say(what)
    if counts.empty_rows:
        say(f"left out: {counts.empty_rows} rows without a prompt, or without an image")
    if counts.long_rows:
        say(f"left out: {counts.long_rows} rows whose prompt has more than {MAX_TEXT} characters")
    if counts.left_out:
        say(f"left out, neither text, number nor bool: {', '.join(sorted(counts.left_out))}")


def _images_below(root: Path, rows: str, key: str) -> Callable[[str], bytes]:
    """Return what reads an image that a row of the file ``rows`` in ``root`` names."""

    def read(path: str) -> bytes:
        file = (root / rows).parent / path.replace("\0", "")
        if not file.resolve().is_relative_to(root.resolve()):
            raise UserError(
                f"{key}.image: {rows} names {path!r}, which is not below {root}; put it there"
            )
        try:
            return file.read_bytes()
        except OSError as error:
            raise UserError(
                f"{key}.image: {rows} names {path!r}, which cannot be read ({error.strerror}); "
                "name a column that holds images, or their paths relative to that file"
            ) from error

    return read


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
