"""Prompts that are made of a user's own files: of which files, and whether they are still the same.

    CACHE/datasets--@files/made/FOLDER-COLUMNS   prompts made of a folder, and the files they
        came from

No file is read to detect changes: names, sizes and times are compared.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from shared.errors import UserError
from shared.learning.hub_datasets import FORMATS, chosen_files


def split_files(source: Path, config: str | None, split: str) -> tuple[Path, list[str]]:
    """Return the folder of a user's files, and which of them hold a split, in order.

    Args:
        source: a folder, or a file, which is read with any split in its name.

    Raises:
        UserError: if it does not exist; the message begins with the key in the table of the data
            set.
    """
    if not source.exists():
        raise UserError(f"folder: there is no {source}; name a folder, or a file, of this host")
    if source.is_file():
        if source.suffix not in FORMATS:
            raise UserError(f"folder: {source} has another format; use {', '.join(FORMATS)}")
        return source.parent, [source.name]
    names = [file.relative_to(source).as_posix() for file in _files(source)]
    if not any(name.endswith(FORMATS) for name in names):
        raise UserError(
            f"folder: {source} has no file named {', '.join(FORMATS)}; one of "
            "Dataset.save_to_disk goes into data.prompts"
        )
    return source, chosen_files(names, (), config, split)


def converted_digest(place: Path, source: Path, selection: str) -> str | None:
    """Return the digest of the prompts that were made of files; None before that, or if the files
    have changed since.

    Args:
        place: folder of what is made of files of this host.
        selection: name of what is taken of the files.
    """
    try:
        digest, files_digest_before = json.loads(_note(place, source, selection).read_bytes())
    except (OSError, ValueError):
        return None
    return str(digest) if files_digest_before == files_digest(source) else None


def note_made(place: Path, source: Path, selection: str, digest: str, state: str) -> None:
    """Note what was made of files in this state, for `converted_digest`."""
    note = _note(place, source, selection)
    note.parent.mkdir(parents=True, exist_ok=True)
    unfinished = note.with_suffix(".new")
    unfinished.write_text(json.dumps([digest, state]))
    unfinished.rename(note)


def files_digest(source: Path) -> str:
    """Return a digest of the files' names, sizes and times, the images among them as well."""
    files = [source] if source.is_file() else sorted(_files(source))
    state = hashlib.sha256()
    for file in files:
        about = file.stat()
        state.update(f"{file}\n{about.st_size}\n{about.st_mtime_ns}\n".encode())
    return state.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if not hidden and file.is_file():
            yield file


def _note(place: Path, source: Path, selection: str) -> Path:
    name = hashlib.sha256(str(source).encode()).hexdigest()[:16]
    return place / "made" / f"{name}-{selection}"
