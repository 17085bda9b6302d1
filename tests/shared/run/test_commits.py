import pytest

from shared.errors import CommitConflict, ContractError
from shared.run.commits import CommitRecord, commit, commit_chain, newest_commit
from shared.run.layout import commit_key
from shared.store import ObjectStore
from tests import examples


async def chain_of(store: ObjectStore, length: int) -> list[CommitRecord]:
    chain: list[CommitRecord] = []
    for version in range(length):
        chain.append(examples.record(version, chain[-1] if chain else None))
        await commit(store, chain[-1])
    return chain


async def test_the_newest_commit_is_found_and_the_chain_read(folder_store: ObjectStore) -> None:
    assert await newest_commit(folder_store, "test") is None
    chain = await chain_of(folder_store, 3)
    assert await newest_commit(folder_store, "test") == chain[2]
    assert await commit_chain(folder_store, "test") == chain
    assert [commit.batch for commit in chain] == [None, 0, 1]


async def test_a_version_is_committed_once(folder_store: ObjectStore) -> None:
    [first] = await chain_of(folder_store, 1)
    with pytest.raises(CommitConflict):
        await commit(folder_store, first.model_copy(update={"worker": "zombie"}))
    assert await newest_commit(folder_store, "test") == first


async def test_a_chain_with_a_foreign_link_is_refused(folder_store: ObjectStore) -> None:
    chain = await chain_of(folder_store, 2)
    await commit(folder_store, examples.record(2, chain[0]))
    with pytest.raises(ContractError, match="version 2"):
        await commit_chain(folder_store, "test")


async def test_a_commit_that_is_no_record_is_refused(folder_store: ObjectStore) -> None:
    await folder_store.write(commit_key("test", 0), b"{}")
    with pytest.raises(ContractError):
        await newest_commit(folder_store, "test")
