"""Which optimizer states are stored, what a resume needs of old batches, and what is deleted."""

import pytest

from services.scheduler.shell.housekeeping import VersionCleanup
from shared.errors import IntegrityError
from shared.messages.contracts import Policy, TrainGroup
from shared.run.checkpoints import (
    Checkpoints,
    add_checkpoint,
    checkpoint_of,
    newest_checkpoint,
    oldest_needed_batch,
    read_commands,
    store_commands,
    stored_versions,
)
from shared.run.commits import CommitRecord, TrainedGroup, commit, record_digest
from shared.run.layout import checkpoints_folder, state_key, weights_folder
from shared.run.retention import Retention
from shared.store import ObjectStore
from tests import examples

RUN = "test"


async def run_of(store: ObjectStore, every: int, number: int) -> list[CommitRecord]:
    """Commit so many versions, of which every so many has its state stored after its commit."""
    chain: list[CommitRecord] = []
    newest, stored = 0, None
    for version in range(number):
        content = str(version).encode()
        weights = await store.put(weights_folder(RUN), content, suffix=".safetensors")
        state = await store.put(checkpoints_folder(RUN), content, suffix=".safetensors")
        if version % every:
            await store.delete([state.key])
        record = CommitRecord(
            run=RUN,
            policy=Policy(version=version, weights_digest=examples.digest(version)),
            parent=record_digest(chain[-1].encode()) if chain else None,
            weights=weights,
            checkpoint=stored or state,
            checkpoint_version=newest if version else None,
            worker="trainer-0",
        )
        await commit(store, record)
        chain.append(record)
        if version % every == 0:
            newest, stored = version, state
            if version:
                await add_checkpoint(store, record, state)
    return chain


async def test_a_damaged_record_of_a_checkpoint_counts_as_none(folder_store: ObjectStore) -> None:
    chain = await run_of(folder_store, 3, 9)
    key = state_key(RUN, 6)
    await folder_store.delete([key])
    await folder_store.create(key, b"{")
    assert (await newest_checkpoint(folder_store, chain[6])).version == 3
    checkpoints = Checkpoints(folder_store, RUN)
    await checkpoints.look()
    assert sorted(checkpoints.known) == [3]


async def test_the_newest_complete_checkpoint_is_found(folder_store: ObjectStore) -> None:
    chain = await run_of(folder_store, 3, 9)
    assert [each.resumes_from for each in chain] == [0, 0, 0, 0, 3, 3, 3, 6, 6]
    for version, wanted in ((0, 0), (2, 0), (3, 3), (5, 3), (6, 6), (8, 6)):
        found = await newest_checkpoint(folder_store, chain[version])
        assert found.version == wanted
        assert await folder_store.get(found.checkpoint) == str(wanted).encode()
    assert await checkpoint_of(folder_store, chain[5]) is None


async def test_a_checkpoint_of_other_weights_is_none(folder_store: ObjectStore) -> None:
    chain = await run_of(folder_store, 3, 4)
    other = Policy(version=3, weights_digest=examples.digest(77))
    assert await checkpoint_of(folder_store, chain[3].model_copy(update={"policy": other})) is None


async def test_what_a_resume_needs_is_kept_and_nothing_else(folder_store: ObjectStore) -> None:
    chain = await run_of(folder_store, 3, 9)
    cleanup = VersionCleanup(
        folder_store, RUN, Retention(keep_last=1), lambda: chain, lambda: (),
        resumes_from=lambda: chain[-1].resumes_from,
    )  # fmt: skip
    await cleanup.look()

    async def left(folder: str) -> set[int]:
        return {int(await folder_store.read(k) or b"-1") for k in await folder_store.keys(folder)}

    assert await left(weights_folder(RUN)) == {0, 6, 8}
    assert await left(checkpoints_folder(RUN)) == {0, 6}
    assert await stored_versions(folder_store, RUN) == {6}
    assert (await newest_checkpoint(folder_store, chain[-1])).version == 6
    assert oldest_needed_batch(chain[-1]) == 6
    assert oldest_needed_batch(chain[6]) == 3, "two for inspection, and what it resumes from"


async def test_who_has_begun_to_resume_keeps_what_the_newest_record_names(
    folder_store: ObjectStore,
) -> None:
    chain = await run_of(folder_store, 3, 7)
    checkpoints = Checkpoints(folder_store, RUN)
    await checkpoints.look()
    assert checkpoints.needed(6, chain[6].resumes_from) == {3, 6}


async def test_commands_that_are_not_of_the_trained_groups_are_refused(
    folder_store: ObjectStore,
) -> None:
    fragment = examples.scored(examples.task())
    group = TrainGroup(
        batch=0, group=0, attempt=2, policy=fragment.policy, fragments=(fragment,),
        advantages=(0.0, 0.0),
    )  # fmt: skip
    trained = TrainedGroup(
        group=0, attempt=2, policy_version=0, fragments=(), workers=(), rewards=(), parts={}
    )
    commands = await store_commands(folder_store, RUN, 0, [group])
    [record] = await run_of(folder_store, 1, 1)
    named = {"policy": examples.policy(1), "commands": commands, "trained": (trained,)}
    made = record.model_copy(update=named)
    assert await read_commands(folder_store, made) == [group]
    other = trained.model_copy(update={"attempt": 1})
    with pytest.raises(IntegrityError, match="other groups"):
        await read_commands(folder_store, made.model_copy(update={"trained": (other,)}))
    with pytest.raises(IntegrityError, match="names no commands"):
        await read_commands(folder_store, record)
