"""Members whose newest version is damaged in the store make it again, from the one before."""

import pytest

from shared.messages.contracts import ObjectRef
from shared.run.commits import CommitRecord
from shared.run.shards import open_tensors
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests.trainer.fluid.director import Director, Start, whole


def flip(store: ObjectStore, ref: ObjectRef) -> None:
    assert isinstance(store.backend, FolderBackend)
    path = store.backend._root / ref.key
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


async def trained(director: Director, batches: int) -> CommitRecord:
    """Train batches by two members, who have the groups in another order each time."""
    recipe = director.recipe
    for batch in range(batches):
        names = "ab" if batch % 2 else "ba"
        parts = {names[0]: [whole(recipe, 0), whole(recipe, 1)], names[1]: [whole(recipe, 2)]}
        record = await director.batch(batch, parts, committer=names[0])
    return record


@pytest.mark.parametrize(
    ("damaged", "deterministic"),
    [
        pytest.param("checkpoint", True, marks=pytest.mark.slow),
        pytest.param("weights", True, marks=pytest.mark.slow),
        pytest.param("checkpoint", False, marks=pytest.mark.slow),
    ],
)
async def test_members_that_all_begin_anew_make_a_damaged_version_again(
    direct: Start, damaged: str, deterministic: bool
) -> None:
    async with direct(trainer__deterministic=deterministic) as director:
        await director.start("a", "b")
        record = await trained(director, 2)
        for name in "ab":
            await director.kill(name)
        ref = getattr(record, damaged)
        flip(director.store, ref)
        await director.start("a", "b")
        for name in "ab":
            held = director.members[name].worker.holds
            assert held is not None
            assert (held.version, held.checksum) == (2, record.checksum)
        restored = await open_tensors(director.store, ref)
        assert [part async for part in restored.parts()], "what came out again was stored again"
        await trained_once_more(director)


async def trained_once_more(director: Director) -> None:
    recipe = director.recipe
    parts = {"a": [whole(recipe, 0)], "b": [whole(recipe, 1), whole(recipe, 2)]}
    assert (await director.batch(2, parts, committer="b")).policy.version == 3
    await director.chain_has(4)


@pytest.mark.slow
async def test_a_version_that_nothing_leads_to_says_what_a_person_can_do(direct: Start) -> None:
    async with direct(trainer__deterministic=True) as director:
        await director.start("a", "b")
        record = await trained(director, 1)
        for name in "ab":
            await director.kill(name)
        flip(director.store, record.checkpoint)
        assert record.commands is not None
        await director.store.delete([record.commands.key])
        await director._start("a")
        worker = director.members["a"].worker
        await director.until(lambda: "move test/commits/00000001.json" in worker._status().note)
        assert worker.holds is None
