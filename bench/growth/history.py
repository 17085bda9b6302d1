"""What a long history costs: the chain of commits in a folder, read, held and shown."""

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from bench.growth.core import REF, policy_of
from shared.run.chain import SEGMENT_STEPS, Chain, read_chain
from shared.run.commits import CommitRecord, StoredRecord, TrainedGroup, record_digest
from shared.run.layout import commit_key
from shared.store import ObjectStore
from shared.store.folder import FolderBackend

RUN = "bench"
METRICS = {f"metric_{number}": number / 7 for number in range(30)} | {"reward_mean": 0.5}


class CountedReads(FolderBackend):
    """A folder that counts what is read of it."""

    num_reads = 0

    async def read(self, key: str) -> bytes | None:
        self.num_reads += 1
        return await super().read(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryCosts:
    steps: int
    start_seconds: float
    """CPU seconds to read the chain, with its segments."""
    start_reads: int
    """Objects that are read then; and two listings."""
    first_start_seconds: float
    """The same for a run of an earlier release, which has no segments."""
    page_seconds: float
    """CPU seconds to make a page of the 50 newest steps."""
    old_page_reads: int
    """Objects that are read for a page of 50 in the middle of the run."""
    resident_bytes: int
    """Memory of this process once the chain is read."""


def record_of(version: int, parent: str | None, groups: int) -> CommitRecord:
    group = TrainedGroup(
        group=0, attempt=0, policy_version=max(0, version - 1),
        fragments=((0, 4, 0), (4, 4, 0), (8, 4, 0), (12, 4, 0)), workers=("rollout-0-0",) * 4,
        rewards=tuple(number / 16 for number in range(16)),
        parts={"proxy": tuple(number / 16 for number in range(16))},
    )  # fmt: skip
    return CommitRecord(
        run=RUN, policy=policy_of(version), parent=parent, weights=REF, checkpoint=REF,
        trained=(group,) * groups if version else (), metrics=METRICS if version else {},
        worker="trainer-0",
    )  # fmt: skip


def write_records(folder: Path, steps: int, groups: int) -> None:
    """Store a run of so many steps, as an earlier release has."""
    parent = None
    (folder / commit_key(RUN, 0)).parent.mkdir(parents=True, exist_ok=True)
    for version in range(steps + 1):
        data = record_of(version, parent, groups).encode()
        (folder / commit_key(RUN, version)).write_bytes(data)
        parent = record_digest(data)


async def measure(folder: Path, steps: int, groups: int) -> HistoryCosts:
    write_records(folder, steps, groups)
    backend = CountedReads(folder)
    store = ObjectStore(backend)
    _, first_start = await _read(store)
    backend.num_reads = 0
    chain, start = await _read(store)
    reads = backend.num_reads
    began = time.process_time()
    await chain.page(steps + 1, 50)
    page, backend.num_reads = time.process_time() - began, 0
    await chain.page(steps // 2, 50)
    return HistoryCosts(
        steps=steps,
        start_seconds=start,
        start_reads=reads,
        first_start_seconds=first_start,
        page_seconds=page,
        old_page_reads=backend.num_reads,
        resident_bytes=resident_bytes(),
    )


async def _read(store: ObjectStore) -> tuple[Chain, float]:
    began = time.monotonic()
    return await read_chain(store, RUN), time.monotonic() - began


async def grow(folder: Path, steps: int, groups: int, looks: tuple[int, ...]) -> dict[int, int]:
    """Resident bytes of a process that has added so many steps to its chain."""
    chain = Chain(ObjectStore(FolderBackend(folder)), RUN)
    parent, found = None, dict[int, int]()
    for version in range(steps + 1):
        record = record_of(version, parent, groups)
        data = record.encode()
        parent = record_digest(data)
        chain.add(StoredRecord(CommitRecord.model_validate_json(data), parent))
        chain.forget(range(version - 2))
        if (version + 1) % SEGMENT_STEPS == 0:
            await chain.keep(version + 1)
        if version in looks:
            found[version] = resident_bytes()
    return found


def resident_bytes() -> int:
    """Memory that this process has at the moment."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not on Linux: the most that it ever had
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")
