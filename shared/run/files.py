"""Whether the files that a run is made from are the same on every host.

<run>/files/<key>.json   digest of what the recipe's key names, and whose it is

The first process that has a folder stores its digest, and everyone else compares. A digest takes
milliseconds: small files are read whole, and of a large one its length, its head and some slices,
which tell two trainings of one network apart.
"""

import asyncio
import hashlib
import json
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from shared.errors import ContractError, UserError
from shared.messages.records import Digest, Record, Text
from shared.models.memory import weight_files
from shared.recipe.files import ROOT
from shared.recipe.paths import paths_of
from shared.recipe.recipe import Recipe
from shared.run.layout import file_key
from shared.store import ObjectStore

WHOLE = 4 << 20
"""Bytes of a file that is read whole."""
HEAD = 1 << 20
"""Of a larger one: as safetensors, the names and shapes of its tensors."""
NUM_SLICES = 16
SLICE = 64 << 10
CONFIGS = (".json", ".txt", ".model")
"""What a part of a pipeline is read from besides its weights."""
NOT_READ = (".md", ".gitattributes", ".pyc")


class FileRecord(Record):
    digest: Digest
    path: Text
    host: Text


def digest_of(path: Path) -> str:
    """SHA-256 over what a run reads of a file, a folder, or a diffusers folder."""
    files = [path] if path.is_file() else _model_files(path) or _all_files(path)
    whole = hashlib.sha256()
    for file in files:
        name = "" if file == path else file.relative_to(path).as_posix()
        whole.update(f"{name}\n{file.stat().st_size}\n".encode())
        for piece in _content(file):
            whole.update(piece)
    return whole.hexdigest()


async def check_files(
    store: ObjectStore, recipe: Recipe, keys: Collection[str], *, needed: bool
) -> None:
    """Compare what ``keys`` name on this host with the run's; store it if nobody has.

    A key that ends with a dot stands for all that begin with it. With ``needed``, what is not on
    this host is an error.

    Raises:
        UserError: one line that names the key, the path and the remedy.
    """
    for key, path in named(recipe, keys).items():
        if not path.exists():
            if needed:
                raise UserError(_is_missing(key, path))
            continue
        found = await asyncio.to_thread(record_of, path)
        stored = await _stored(store, recipe.run.name, key)
        if stored is None:
            data = found.model_dump_json(indent=1).encode()
            await store.create(file_key(recipe.run.name, key), data)
            stored = await _stored(store, recipe.run.name, key)
        if stored is not None:
            check_same(key, stored, found)


def records_of(recipe: Recipe, keys: Collection[str]) -> dict[str, FileRecord]:
    """Of what ``keys`` stand for, and is on this host."""
    there = {key: path for key, path in named(recipe, keys).items() if path.exists()}
    return {key: record_of(path) for key, path in there.items()}


def matching(stored: Mapping[str, FileRecord], found: Mapping[str, FileRecord]) -> set[str]:
    """Keys of both.

    Raises:
        UserError: if the files of one of them differ.
    """
    for key in stored.keys() & found.keys():
        check_same(key, stored[key], found[key])
    return stored.keys() & found.keys()


async def same_files(store: ObjectStore, recipe: Recipe, keys: Collection[str]) -> set[str]:
    """Of ``keys``, those whose file is on this host and is the one that the run has used.

    Raises:
        UserError: if it is another one.
    """
    found = await asyncio.to_thread(records_of, recipe, keys)
    stored = {key: await _stored(store, recipe.run.name, key) for key in found}
    return matching({key: each for key, each in stored.items() if each is not None}, found)


def named(recipe: Recipe, keys: Collection[str]) -> dict[str, Path]:
    """Key -> path, of what ``keys`` stand for in this recipe. A file with an API key is none."""
    return {
        key: Path(path)
        for key, path in paths_of(recipe.model_dump(mode="json")).items()
        if not key.endswith(".key_file")
        and any(key.startswith(each) if each.endswith(".") else key == each for each in keys)
    }


def record_of(path: Path) -> FileRecord:
    return FileRecord(digest=digest_of(path), path=str(path), host=socket.gethostname())


def check_same(key: str, stored: FileRecord, found: FileRecord) -> None:
    """Raises UserError, one line with both digests, if they differ."""
    if stored.digest != found.digest:
        raise UserError(
            f"{key}: {found.path} on {found.host} has the digest {found.digest[:12]}, and the run "
            f"uses {stored.path} on {stored.host} with {stored.digest[:12]}; copy that one here, "
            f"or set {ROOT} to the folder that holds it"
        )


def _is_missing(key: str, path: Path) -> str:
    root = os.environ.get(ROOT)
    wanted = f"correct {ROOT}, which is {root}" if root else f"set {ROOT} to the folder that has it"
    return f"{key}: {path} is not on this host, {socket.gethostname()}; copy it here, or {wanted}"


async def _stored(store: ObjectStore, run: str, key: str) -> FileRecord | None:
    data = await store.read(file_key(run, key))
    try:
        return None if data is None else FileRecord.model_validate_json(data)
    except ValidationError as error:
        raise ContractError(f"{file_key(run, key)} is not a record of this release") from error


def _model_files(folder: Path) -> list[Path]:
    """What diffusers reads of a model; nothing if it is none."""
    index = folder / "model_index.json"
    try:
        parts = json.loads(index.read_text())
        names = [name for name, told in parts.items() if isinstance(told, list) and all(told)]
    except (OSError, ValueError, AttributeError):
        return []
    found = [index]
    for part in (folder / name for name in sorted(names)):
        configs = [file for file in part.glob("*") if file.suffix in CONFIGS]
        found += [file for file in sorted({*configs, *weight_files(part)}) if file.is_file()]
    return found


def _all_files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and file.suffix not in NOT_READ
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def _content(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= WHOLE:
            yield stream.read()
            return
        yield stream.read(HEAD)
        for number in range(NUM_SLICES):
            stream.seek(HEAD + number * (size - HEAD - SLICE) // (NUM_SLICES - 1))
            yield stream.read(SLICE)
