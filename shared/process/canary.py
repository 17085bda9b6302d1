"""Compares kinds of devices and versions of libraries when a device joins: each kind stores, once
for a run, a few numbers that it makes of one input, and a device whose numbers are others than
those of another kind says by how much.

Samples of such devices differ as much, and the ratio of a sample to its replay on another kind is
as far from 1 (`onpolicy_ratio_error`): that is no fault, but no two runs have the same bytes then.
"""

import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping

import structlog

from shared.process.libraries import processor, versions
from shared.run.copies import write_kept
from shared.run.files import CanaryRecord, read_records
from shared.store import ObjectStore

PREFIX = "canary."
"""Beginning of the names of a run's records of kinds, among those of its files."""

Measure = Callable[[], Awaitable[tuple[float, ...]]]

log = structlog.get_logger()


async def told_apart(store: ObjectStore, run: str, device: str, measure: Measure) -> str:
    """Return by how much this device differs from the other kinds of the run, in words; nothing if
    there is no other, or all have the same numbers. The first of a kind measures and stores.

    Args:
        device: the maker's name, or "cpu".
    """
    named = f"cpu {processor() or ''}".strip() if device == "cpu" else device
    mine = CanaryRecord(device=named, versions=dict(versions()), numbers=())
    kind = hashlib.sha256(mine.model_dump_json().encode()).hexdigest()[:16]
    if known := await read_records(store, run, f"{PREFIX}{kind}.", CanaryRecord):
        [mine] = known
    else:
        mine = mine.model_copy(update={"numbers": await measure()})
        await write_kept(store, run, f"files/{PREFIX}{kind}", mine.model_dump_json().encode())
    known = await read_records(store, run, PREFIX, CanaryRecord)
    others = [each for each in known if each.numbers != mine.numbers]
    differences = {_apart(mine, each): each for each in others}
    if not differences:
        return ""
    most = max(differences)
    note = f"its numbers differ from those of {_told(differences[most], mine)} by {most:.1g}"
    log.warning("devices_differ", mine=_told(mine, differences[most]), note=note)
    return f"{note} of the largest one: samples of one seed are not the same to the byte"


def _apart(one: CanaryRecord, other: CanaryRecord) -> float:
    if len(one.numbers) != len(other.numbers):
        return 1.0
    pairs = zip(one.numbers, other.numbers, strict=True)
    return max((abs(mine - theirs) for mine, theirs in pairs), default=0.0)


def _told(kind: CanaryRecord, beside: CanaryRecord) -> str:
    """Name a kind, with those of its versions that the other does not have."""
    more = ", ".join(_other_versions(kind.versions, beside.versions))
    return f"{kind.device} with {more}" if more else kind.device


def _other_versions(mine: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[str]:
    for name, version in mine.items():
        if theirs.get(name) != version:
            yield f"{name} {version}"
