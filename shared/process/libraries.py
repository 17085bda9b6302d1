"""Versions of the libraries that samples and gradients are made of, in each process of a run."""

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import ValidationError

from shared.errors import ContractError
from shared.messages.records import Record, Text
from shared.messages.workers import Service
from shared.run.layout import file_key
from shared.store import ObjectStore

LIBRARIES = (
    "digenrl", "torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "numpy",
    "scikit-learn", "tokenizers", "torchao",
)  # fmt: skip
PREFIX = "libraries."
"""Beginning of the names of a run's records of libraries, among those of its files."""


class LibrariesRecord(Record):
    """Says which versions a service has on some host; a run has one for each that differs."""

    service: Service
    versions: dict[Text, Text]


@cache
def processor() -> str | None:
    """Return the maker's name of this machine's processor, if it says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, None)


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of the libraries that are installed, and of Python."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


async def record_versions(store: ObjectStore, run: str, service: Service) -> None:
    """Store with the run which versions a process of the service has, if no other has the same."""
    record = LibrariesRecord(service=service, versions=dict(versions()))
    digest = hashlib.sha256(json.dumps(record.versions, sort_keys=True).encode()).hexdigest()
    key = file_key(run, f"{PREFIX}{service}.{digest[:16]}")
    await store.create(key, record.model_dump_json().encode())


async def recorded_versions(store: ObjectStore, run: str) -> dict[str, str]:
    """Return the versions that processes of a run have had, by service and library, such as
    ``{"torch of rollout": "2.10.0, 2.11.0"}``.

    Raises:
        ContractError: if a record is damaged.
    """
    prefix = file_key(run, PREFIX).removesuffix(".json")
    folder = prefix.rpartition("/")[0]
    found: dict[str, set[str]] = {}
    for key in await store.keys(folder):
        if key.startswith(prefix) and (data := await store.read(key)) is not None:
            record = _read(key, data)
            for name, each in record.versions.items():
                found.setdefault(f"{name} of {record.service}", set()).add(each)
    return {name: ", ".join(sorted(each)) for name, each in sorted(found.items())}


def _read(key: str, data: bytes) -> LibrariesRecord:
    try:
        return LibrariesRecord.model_validate_json(data)
    except ValidationError as error:
        raise ContractError(f"{key} is not a record of this release") from error
