"""Converts a user's own files to prompts once, and detects later changes of the files.

    CACHE/datasets--@files/made/FOLDER-COLUMNS   note: digests of the prompts and of their files

Changes are detected by names, sizes and modification times, without reading files.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from shared.errors import UserError
from shared.learning.hub_datasets import FORMATS, chosen_files


def split_files(source: Path, config: str | None, split: str) -> tuple[Path, list[str]]:
    """Return a folder and the names of its files that belong to a split, in order.

    Args:
        source: a folder, or a single file, which belongs to every split.

    Raises:
        UserError: if the source does not exist or has another format; the message begins with the
            recipe key.
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
            f"folder: {source} has no file named {', '.join(FORMATS)}; a folder of "
            "Dataset.save_to_disk goes into data.prompts"
        )
    return source, chosen_files(names, (), config, split)


def converted_digest(place: Path, source: Path, selection: str) -> str | None:
    """Return the digest of the prompts of files; None if the files are not converted or have
    changed since their conversion.

    Args:
        place: cache folder of converted files.
        selection: name of the selected columns and split.
    """
    try:
        digest, files_digest_before = json.loads(_note(place, source, selection).read_bytes())
    except (OSError, ValueError):
        return None
    return str(digest) if files_digest_before == files_digest(source) else None


def note_conversion(place: Path, source: Path, selection: str, digest: str, state: str) -> None:
    """Record the digest of the prompts and the state of their files, for `converted_digest`."""
    note = _note(place, source, selection)
    note.parent.mkdir(parents=True, exist_ok=True)
    unfinished = note.with_suffix(".new")
    unfinished.write_text(json.dumps([digest, state]))
    unfinished.rename(note)


def files_digest(source: Path) -> str:
    """Return a digest of the names, sizes and modification times of all files, with images."""
    files = [source] if source.is_file() else sorted(_files(source))
    state = hashlib.sha256()
    for file in files:
        status = file.stat()
        state.update(f"{file}\n{status.st_size}\n{status.st_mtime_ns}\n".encode())
    return state.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if not hidden and file.is_file():
            yield file


def _note(place: Path, source: Path, selection: str) -> Path:
    name = hashlib.sha256(str(source).encode()).hexdigest()[:16]
    return place / "made" / f"{name}-{selection}"
