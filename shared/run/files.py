"""Checks that the files which a recipe names are the same on every host.

The first process that has a folder stores its digest, and every other process compares. A digest
takes milliseconds: small files are read whole; of a large one only its length, its head and some
slices are read, and two trainings of one network differ in them.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from shared.errors import ContractError, UserError
from shared.learning.hub_datasets import missing_dataset_advice
from shared.learning.prompts import source_digests
from shared.limits import DIGEST_POLL_S
from shared.messages.records import Digest, Record, Text
from shared.messages.workers import Service
from shared.models.hub import ROOT, WEIGHTS, missing
from shared.models.memory import weight_files
from shared.recipe.files import key_paths
from shared.recipe.recipe import Recipe
from shared.run.layout import file_key, named_objects
from shared.run.record_backups import create_kept, damaged, read_kept
from shared.store import ObjectStore

MAX_WHOLE_BYTES = 4 << 20
"""Largest size of a file that is read whole."""
HEAD_BYTES = 1 << 20
"""Read from the start of a larger file: in safetensors, names and shapes of its tensors."""
NUM_SLICES = 16
SLICE_BYTES = 64 << 10
PROMPTS = "data.prompts"
IGNORED_SUFFIXES = (".md", ".gitattributes", ".pyc")

RecordT = TypeVar("RecordT", bound=Record)


class FileRecord(Record):
    digest: Digest
    path: Text
    host: Text


class LibrariesRecord(Record):
    """The versions that a service has on some host; a run has one record for each difference."""

    service: Service
    versions: dict[Text, Text]


def file_digest(path: Path) -> str:
    """Return the SHA-256 over what a run reads of a file, a folder, or a diffusers folder."""
    files = [path] if path.is_file() else _model_files(path) or _all_files(path)
    whole = hashlib.sha256()
    for file in files:
        name = "" if file == path else file.relative_to(path).as_posix()
        whole.update(f"{name}\n{file.stat().st_size}\n".encode())
        for block in _blocks(file):
            whole.update(block)
    return whole.hexdigest()


async def check_files(
    store: ObjectStore, recipe: Recipe, keys: Collection[str], *, needed: bool, stores: bool = True
) -> None:
    """Compare the files that ``keys`` name on this host with the run's, and store their digests if
    the run has none.

    A key that ends with a dot stands for all that begin with it. With ``needed``, a file that is
    missing on this host is an error. Without ``stores``, the role may not write the digests: it
    waits for the ones that it needs.

    Raises:
        UserError: one line that names the key, the path and the remedy.
    """
    for key, path in paths_named(recipe, keys).items():
        if not path.exists():
            if needed:
                raise UserError(_is_missing(key, path))
            continue
        record = await asyncio.to_thread(record_file, key, path)
        stored = await _stored(store, recipe.run.name, key)
        while stored is None and (stores or needed):
            if stores:
                data = record.model_dump_json(indent=1).encode()
                await create_kept(store, recipe.run.name, f"files/{key}", data)
            else:
                await asyncio.sleep(DIGEST_POLL_S)
            stored = await _stored(store, recipe.run.name, key)
        if stored is not None:
            check_same_file(key, stored, record)


def file_records(recipe: Recipe, keys: Collection[str]) -> dict[str, FileRecord]:
    """Return the digests of the files of ``keys`` that are on this host."""
    paths = {key: path for key, path in paths_named(recipe, keys).items() if path.exists()}
    return {key: record_file(key, path) for key, path in paths.items()}


def matching(stored: Mapping[str, FileRecord], current: Mapping[str, FileRecord]) -> set[str]:
    """Return the keys that both have.

    Raises:
        UserError: if the files of such a key differ.
    """
    for key in stored.keys() & current.keys():
        check_same_file(key, stored[key], current[key])
    return stored.keys() & current.keys()


async def same_files(store: ObjectStore, recipe: Recipe, keys: Collection[str]) -> set[str]:
    """Return those ``keys`` whose file is on this host and matches the run's.

    Raises:
        UserError: if a file on this host differs from the run's.
    """
    current = await asyncio.to_thread(file_records, recipe, keys)
    return matching(await stored_records(store, recipe, keys), current)


def paths_named(recipe: Recipe, keys: Collection[str]) -> dict[str, Path]:
    """Return the paths of ``keys`` in this recipe, without files that hold an API key."""
    return {
        key: Path(path)
        for key, path in key_paths(recipe.model_dump(mode="json")).items()
        if not key.endswith(".key_file")
        and any(key.startswith(each) if each.endswith(".") else key == each for each in keys)
    }


def record_file(key: str, path: Path) -> FileRecord:
    """Digest the file of a recipe's ``key``; of prompts, their source images as well."""
    digest = file_digest(path)
    images = source_digests(path) if key == PROMPTS else []
    if images:
        digest = hashlib.sha256("\n".join([digest, *images]).encode()).hexdigest()
    return FileRecord(digest=digest, path=str(path), host=socket.gethostname())


def check_same_file(key: str, stored: FileRecord, current: FileRecord) -> None:
    """Raises UserError, one line with both digests, if the digests differ."""
    if stored.digest == current.digest:
        return
    digests = current.digest[:12], stored.digest[:12]
    if (stored.host, stored.path) == (current.host, current.path):
        raise UserError(
            f"{key}: {current.path} has changed since the run began: it has the digest "
            f"{digests[0]}, and the run uses {digests[1]}. A run keeps its files: restore this "
            "one, or start a new run with `--fresh`"
        )
    raise UserError(
        f"{key}: {current.path} on {current.host} has the digest {digests[0]}, and the run uses "
        f"{stored.path} on {stored.host} with {digests[1]}; name that one, copy it here, or set "
        f"{ROOT} to the folder that holds it"
    )


def _is_missing(key: str, path: Path) -> str:
    of_hub = missing(path) or missing_dataset_advice(path)
    if of_hub is not None:
        return of_hub
    root = os.environ.get(ROOT)
    wanted = f"correct {ROOT}, which is {root}" if root else f"set {ROOT} to the folder that has it"
    return f"{key}: {path} is not on this host, {socket.gethostname()}; copy it here, or {wanted}"


async def stored_digest(store: ObjectStore, run: str, key: str) -> str:
    """Return the digest of the run's file of ``key``, which this process has compared.

    Raises:
        ContractError: if none is stored.
    """
    record = await _stored(store, run, key)
    if record is None:
        raise ContractError(f"{file_key(run, key)} is missing")
    return record.digest


async def stored_records(
    store: ObjectStore, recipe: Recipe, keys: Collection[str]
) -> dict[str, FileRecord]:
    """Return the digests of the run's files of ``keys``."""
    found = {key: await _stored(store, recipe.run.name, key) for key in paths_named(recipe, keys)}
    return {key: each for key, each in found.items() if each is not None}


async def _stored(store: ObjectStore, run: str, key: str) -> FileRecord | None:
    data = await read_kept(store, run, f"files/{key}")
    try:
        return None if data is None else FileRecord.model_validate_json(data)
    except ValidationError as error:
        raise damaged(run, file_key(run, key)) from error


async def read_records(
    store: ObjectStore, run: str, prefix: str, model: type[RecordT]
) -> list[RecordT]:
    """Return a run's records whose keys begin so; damaged ones count as absent: they only serve
    notes and reports."""
    records = list[RecordT]()
    for key in await named_objects(store, run, "files"):
        name = key.removeprefix(f"{run}/").removesuffix(".json")
        if f"{name}.".startswith(f"files/{prefix}"):
            with contextlib.suppress(ValidationError):
                records.append(model.model_validate_json(await read_kept(store, run, name) or b""))
    return records


def _model_files(folder: Path) -> list[Path]:
    """Return the files that diffusers reads of a model, none if the folder is no model."""
    index = folder / "model_index.json"
    try:
        parts = json.loads(index.read_text())
        names = [name for name, kind in parts.items() if isinstance(kind, list) and all(kind)]
    except (OSError, ValueError, AttributeError):
        return []
    files = [index]
    for part in (folder / name for name in sorted(names)):
        configs = [file for file in _all_files(part) if not file.name.endswith(WEIGHTS)]
        files += [file for file in sorted({*configs, *weight_files(part)}) if file.is_file()]
    return files


def _all_files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and file.suffix not in IGNORED_SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def _blocks(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= MAX_WHOLE_BYTES:
            yield stream.read()
            return
        yield stream.read(HEAD_BYTES)
        for number in range(NUM_SLICES):
            stream.seek(HEAD_BYTES + number * (size - HEAD_BYTES - SLICE_BYTES) // (NUM_SLICES - 1))
            yield stream.read(SLICE_BYTES)
