"""The summary of the chain: it says what the records say, whatever is left of it."""

from pathlib import Path

import pytest

from shared.errors import ContractError
from shared.limits import MAX_RECENT_STEPS
from shared.run.chain import SEGMENT_STEPS, Chain, CommitSummary, read_chain, summarise_commit
from shared.run.commits import CommitRecord, StoredRecord, record_digest
from shared.run.layout import chain_folder, commit_key, segment_key
from shared.store import ObjectStore
from tests import examples
from tests.shared.store.hosts import CountedReads

RUN = "test"


def record(version: int, parent: str | None, *, late: bool = False) -> CommitRecord:
    groups = tuple(
        examples.trained_group(group, max(0, version - 1 - late), rewards)
        for group, rewards in enumerate(((0.0, 1.0), (1.0, 1.0)))
    )
    return examples.record(
        version, run=RUN, parent=parent, weights=examples.ref(f"weights-{version}"),
        checkpoint=examples.ref(f"checkpoint-{version}"), trained=groups if version else (),
        metrics={"reward_mean": version / 2} if version else {},
    )  # fmt: skip


def write(root: Path, count: int, first: int = 0, *, late: bool = False) -> list[StoredRecord]:
    """Store records up to ``count``, without segments."""
    written, digest = list[StoredRecord](), None
    for version in range(count):
        path = root / commit_key(RUN, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        if version >= first:
            path.write_bytes(record(version, digest, late=late).encode())
        data = path.read_bytes()
        digest = record_digest(data)
        written.append(StoredRecord(CommitRecord.model_validate_json(data), digest))
    return written


@pytest.fixture
def backend(tmp_path: Path) -> CountedReads:
    return CountedReads(tmp_path)


@pytest.fixture
def store(backend: CountedReads) -> ObjectStore:
    return ObjectStore(backend)


async def read(store: ObjectStore) -> tuple[Chain, list[CommitSummary]]:
    """The chain, and all its steps."""
    chain = await read_chain(store, RUN, wanted=lambda step: True)
    return chain, chain.wanted


async def test_a_run_without_segments_gets_them_and_says_the_same_from_them(
    tmp_path: Path, store: ObjectStore, backend: CountedReads
) -> None:
    written = write(tmp_path, MAX_RECENT_STEPS + 2 * SEGMENT_STEPS + 3)
    steps = [summarise_commit(each) for each in written]
    first, found = await read(store)
    assert found == steps
    backend.num_reads = 0
    again, from_segments = await read(store)
    assert backend.num_reads == (MAX_RECENT_STEPS + 2 * SEGMENT_STEPS) // SEGMENT_STEPS + 3 + 1, (
        "the newest record twice"
    )
    assert from_segments == steps
    assert list(again.recent) == steps[-MAX_RECENT_STEPS:]
    assert again.newest == first.newest == written[-1].record
    assert await again.page(150, 100) == steps[50:150][::-1]
    assert await again.page(10**9, 3) == steps[-3:][::-1]


async def test_segments_are_kept_as_steps_come_and_are_those_that_records_give(
    tmp_path: Path, store: ObjectStore
) -> None:
    chain = Chain(store, RUN)
    for stored in write(tmp_path, 2 * SEGMENT_STEPS + 1):
        chain.add(stored)
        if (chain.version + 1) % SEGMENT_STEPS == 0:
            await chain.keep(chain.version + 1)
    keys = await store.keys(chain_folder(RUN))
    assert len(keys) == 2
    kept = {key: await store.read(key) for key in keys}
    await store.delete(keys)
    await read_chain(store, RUN)
    assert {key: await store.read(key) for key in await store.keys(chain_folder(RUN))} == kept


@pytest.mark.parametrize("damage", ["missing", "no JSON", "of another place", "of other records"])
async def test_segments_that_are_not_what_the_records_say_are_left_aside(
    tmp_path: Path, store: ObjectStore, damage: str
) -> None:
    count = MAX_RECENT_STEPS + 4 * SEGMENT_STEPS
    steps = [summarise_commit(each) for each in write(tmp_path, count)]
    await read_chain(store, RUN)
    key = segment_key(RUN, 2 * SEGMENT_STEPS)
    right = await store.read(key)
    match damage:
        case "missing":
            await store.delete([key])
        case "no JSON":
            await store.write(key, b"{")
        case "of another place":
            await store.write(key, await store.read(segment_key(RUN, SEGMENT_STEPS)) or b"")
        case _:  # the last steps were rolled back, and taken again in another way
            steps = [
                summarise_commit(each)
                for each in write(tmp_path, count, 2 * SEGMENT_STEPS + 5, late=True)
            ]
            right = None
    assert (await read(store))[1] == steps
    assert right is None or await store.read(key) == right, "it is made again"
    assert (await read(store))[1] == steps


async def test_a_record_that_does_not_name_the_one_before_is_not_passed_over(
    tmp_path: Path, store: ObjectStore
) -> None:
    write(tmp_path, SEGMENT_STEPS + 2)
    await read_chain(store, RUN)
    path = tmp_path / commit_key(RUN, SEGMENT_STEPS + 1)
    path.write_bytes(record(SEGMENT_STEPS + 1, examples.digest(7)).encode())
    with pytest.raises(ContractError, match=f"broken at version {SEGMENT_STEPS + 1}"):
        await read_chain(store, RUN)


async def test_a_record_that_is_missing_is_no_shorter_chain(
    tmp_path: Path, store: ObjectStore
) -> None:
    write(tmp_path, SEGMENT_STEPS + 2)
    await read_chain(store, RUN)
    (tmp_path / commit_key(RUN, 3)).unlink()
    with pytest.raises(ContractError, match="a record is missing"):
        await read_chain(store, RUN)


async def test_of_old_steps_only_those_are_held_that_are_wanted(
    tmp_path: Path, store: ObjectStore
) -> None:
    write(tmp_path, MAX_RECENT_STEPS + 2 * SEGMENT_STEPS)
    chain = await read_chain(store, RUN, wanted=lambda step: step.version == 5)
    newest = MAX_RECENT_STEPS + 2 * SEGMENT_STEPS - 1
    assert [step.version for step in chain.wanted] == [5, newest]
    assert (len(chain.recent), chain.version) == (MAX_RECENT_STEPS, newest)
    chain.forget([5])
    assert [step.version for step in chain.wanted] == [newest]
