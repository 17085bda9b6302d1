"""Versions of the libraries that samples and gradients are made of, in each process of a run."""

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shared.messages.workers import Service
from shared.release import RELEASE
from shared.run.files import LibrariesRecord, read_records
from shared.run.record_backups import create_kept
from shared.store import ObjectStore

LIBRARIES = (
    "torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "numpy",
    "tokenizers",
)  # fmt: skip
PREFIX = "libraries."
"""Prefix of the names of a run's records of libraries, among its files."""


@cache
def processor() -> str | None:
    """Return the maker's name of this machine's processor, if it is known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, None)


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of the libraries that are installed, and of Python."""
    versions_by_name = {"digenrl": RELEASE, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions_by_name[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions_by_name


async def record_versions(store: ObjectStore, run: str, service: Service) -> None:
    """Store with the run which versions a process of the service has, if no other has the same."""
    record = LibrariesRecord(service=service, versions=dict(versions()))
    digest = hashlib.sha256(json.dumps(record.versions, sort_keys=True).encode()).hexdigest()
    name = f"files/{PREFIX}{service}.{digest[:16]}"
    await create_kept(store, run, name, record.model_dump_json().encode())


async def recorded_versions(store: ObjectStore, run: str) -> dict[str, str]:
    """Return the versions that processes of a run have had, by service and library, such as
    ``{"torch of rollout": "2.10.0, 2.11.0"}``; damaged records are skipped.
    """
    versions_by_name: dict[str, set[str]] = {}
    for record in await read_records(store, run, PREFIX, LibrariesRecord):
        for name, each in record.versions.items():
            versions_by_name.setdefault(f"{name} of {record.service}", set()).add(each)
    return {name: ", ".join(sorted(each)) for name, each in sorted(versions_by_name.items())}
