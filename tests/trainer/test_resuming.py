"""A trainer that is killed at any point of a commit goes on to the same version, and trains what it
has no optimizer state of again, without telling anybody."""

import asyncio

import pytest

from shared.messages.contracts import GroupTrained, ObjectRef
from shared.run.chain import read_chain
from shared.run.checkpoints import checkpoint_of, newest_checkpoint
from shared.run.commits import commit_chain
from shared.run.copies import keep_copy
from shared.run.layout import commit_key
from shared.run.shards import is_whole
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests.trainer.cluster import RUN, Cluster, Start
from tests.trainer.fakes import FakeTraining

KILLS = {
    "after the step": ("weights/", False),
    "when the adapter is stored": ("weights/", True),
    "before the record": ("commits/00000002", False),
    "after the record": ("commits/00000002", True),
    "before the states": ("checkpoints/", False),
    "when the states are stored": ("checkpoints/", True),
    "before it is said of the states": ("states/00000002", False),
    "after it is said of the states": ("states/00000002", True),
}


async def trained_to(run: Cluster, version: int) -> None:
    """Train batches until the run is at this version, and its states are stored if they are due."""
    for batch in range(len(await commit_chain(run.store, RUN)) - 1, version):
        await run.send(batch, 0, 1)
        await run.commit(batch + 1)
    await stored(run, version)


async def stored(run: Cluster, version: int) -> None:
    """Wait until the states of a version are stored, if they are to be."""
    every = run.app._recipe.checkpoint_every
    record = await run.commit(version - version % every)
    async with asyncio.timeout(20):
        while await checkpoint_of(run.store, record) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("kill", "every"),
    [
        *((kill, 1) for kill in KILLS),
        *(pytest.param(kill, 2, marks=pytest.mark.slow) for kill in KILLS),
        *(pytest.param(kill, 3, marks=pytest.mark.slow) for kill in list(KILLS)[:4]),
    ],
)
async def test_a_trainer_that_is_killed_goes_on_to_the_same_version(
    trainer: Start, kill: str, every: int
) -> None:
    key, after = KILLS[kill]
    changes = {"trainer__checkpoint_every": every}
    async with trainer(**changes) as run:
        run.run_freely()
        await trained_to(run, 1)
        run.backend.stops_at, run.backend.stops_after = key, after
        await run.send(1, 0, 1)
        async with asyncio.timeout(20):
            await run.backend.has_stopped.wait()
    async with trainer(**changes) as run:
        run.run_freely()
        second = await run.commit(2)
        await run.send(2, 0, 1)
        third = await run.commit(3)
        assert run.training.adapter == b"fresh+8+8+8"
        assert "replace" not in " ".join(run.training.log), "the same weights came out again"
        was_committed = key.startswith(("checkpoints", "states")) or kill == "after the record"
        told = [event.batch for event in await run.told(GroupTrained, 6)]
        assert await run.all_told(GroupTrained) == (6 if was_committed else 8)
        assert told.count(0) == 2, "what is trained again is not told"
        assert [r.policy.version for r in await commit_chain(run.store, RUN)] == [0, 1, 2, 3]
        assert second.resumes_from == 0 if every > 1 else second.resumes_from == 1
        await stored(run, 3)
        assert (await newest_checkpoint(run.store, third)).version == 3 - 3 % every


async def test_a_record_names_the_newest_checkpoint_that_is_complete(trainer: Start) -> None:
    async with trainer() as run:
        run.run_freely()
        run.backend.stops_at = "checkpoints/"
        await run.send(0, 0, 1)
        first = await run.commit(1)
        assert (first.checkpoint_version, first.resumes_from) == (0, 0)
        assert first.checkpoint == (await run.commit(0)).checkpoint
        assert await checkpoint_of(run.store, first) is None
        await run.send(1, 0, 1)
        await run.told(GroupTrained, 4)
        await asyncio.sleep(0.1)
        assert "step 1" not in run.training.log, "its states would overwrite what is being stored"


async def test_the_last_version_is_committed_with_its_states(trainer: Start) -> None:
    async with trainer(run__steps=1) as run:
        run.run_freely()
        await run.send(0, 0, 1)
        record = await run.commit(1)
        assert record.checkpoint_version is None and record.commands is None
        assert await run.store.get(record.checkpoint) == b"of fresh+8"


async def test_committed_weights_take_the_place_of_those_that_come_out_otherwise(
    trainer: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trainer(trainer__checkpoint_every=5) as run:
        run.run_freely()
        await trained_to(run, 2)
    made = FakeTraining.__init__

    def rounds_otherwise(self: FakeTraining, num_devices: int) -> None:
        made(self, num_devices)
        self.rounding = "~"

    monkeypatch.setattr(FakeTraining, "__init__", rounds_otherwise)
    async with trainer(trainer__checkpoint_every=5) as run:
        run.run_freely()
        await run.log_holds("replace fresh+8+8")
        assert run.training.log == [
            "restore fresh", "d0 train 0/0 0-3", "d0 train 0/1 0-3", "step 0",
            "d0 train 1/0 0-3", "d0 train 1/1 0-3", "step 1", "replace fresh+8+8",
        ]  # fmt: skip


async def test_what_is_no_longer_there_is_not_trained_again(trainer: Start) -> None:
    """The run goes on with its weights, and an older state of the optimizer."""
    async with trainer(trainer__checkpoint_every=5) as run:
        run.run_freely()
        await trained_to(run, 2)
        await run.store.delete_folder(f"{RUN}/batches/00000001")
    async with trainer(trainer__checkpoint_every=5) as run:
        run.run_freely()
        await run.log_holds("replace fresh+8+8")
        assert "step 1" not in run.training.log


async def test_a_state_that_a_killed_trainer_has_not_stored_is_made_up_for_by_the_next(
    trainer: Start,
) -> None:
    """So that a record is resumed from no more than twice `checkpoint_every` less one before it."""
    changes = {"trainer__checkpoint_every": 3}
    async with trainer(**changes) as run:
        run.run_freely()
        await trained_to(run, 2)
        run.backend.stops_at = "checkpoints/"
        for batch in range(2, 5):
            await run.send(batch, 0, 1)
            await run.commit(batch + 1)
        assert run.backend.has_stopped.is_set(), "it is killed while it stores the state of 3"
    async with trainer(**changes) as run:
        run.run_freely()
        await run.send(5, 0, 1)
        records = [await run.commit(version) for version in range(7)]
    assert [each.resumes_from for each in records] == [0, 0, 0, 0, 0, 0, 5]


async def test_a_resume_says_what_it_trains_again(trainer: Start) -> None:
    async with trainer(trainer__checkpoint_every=5) as run:
        run.run_freely()
        await trained_to(run, 1)
    async with trainer(trainer__checkpoint_every=5) as run:
        await run.log_holds("d0 train 0/0 0-3")  # and goes on
        assert "trains batches 0 to 0 again" in run.worker._status().note
        run.run_freely()
        await run.log_holds("step 0")
        await run.until(lambda: not run.worker._status().note)


async def test_only_the_first_device_is_held_while_a_version_is_copied(trainer: Start) -> None:
    """No device is held while it is digested and stored."""
    async with trainer(schedule__max_staleness=1, trainer__devices=2) as run:
        run.run_freely()
        await run.commit(0)
        run.training.copying.clear()
        await run.send(0, 0, 1)
        await run.log_holds("step 0")
        await run.send(1, 0, version=0)
        await run.until(lambda: any("train 1/0" in each for each in run.training.log))
        await asyncio.sleep(0.05)
        begun = [each for each in run.training.log if "train 1/0" in each]
        assert begun and all(each.startswith("d1") for each in begun)
        run.backend.held_back = 1
        run.training.copying.set()
        await run.send(1, 1, version=0)
        await run.told(GroupTrained, 4)
        assert any(each.startswith("d0 train 1/1") for each in run.training.log)
        run.backend.given.set()
        await run.commit(2)


def flip(store: ObjectStore, ref: ObjectRef) -> None:
    """Damage one byte of an object of a folder store."""
    assert isinstance(store.backend, FolderBackend)
    path = store.backend._root / ref.key
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damaged", ["checkpoint", "weights"])
async def test_a_damaged_byte_in_the_newest_version_sends_a_trainer_back_to_the_one_before(
    trainer: Start, damaged: str
) -> None:
    async with trainer(trainer__checkpoint_every=1) as run:
        run.run_freely()
        await trained_to(run, 2)
        newest = await run.commit(2)
        at = await newest_checkpoint(run.store, newest)
    ref = at.checkpoint if damaged == "checkpoint" else newest.weights
    flip(run.store, ref)
    assert not await is_whole(run.store, ref)
    async with trainer(trainer__checkpoint_every=1) as run:
        run.run_freely()
        await run.send(2, 0, 1)
        await run.commit(3)
        assert run.training.adapter == b"fresh+8+8+8"
        assert [r.policy.version for r in await commit_chain(run.store, RUN)] == [0, 1, 2, 3]
    assert await is_whole(run.store, ref), "what came out again was stored again"


async def test_a_damaged_record_is_read_from_its_copy(trainer: Start) -> None:
    async with trainer() as run:
        run.run_freely()
        await trained_to(run, 2)
        chain = await read_chain(run.store, RUN)
        for step in chain.recent:
            await keep_copy(run.store, RUN, step.version, step.digest)
    before = await commit_chain(run.store, RUN)
    for version in (1, 2):
        key = commit_key(RUN, version)
        data = await run.store.read(key)
        assert data is not None
        await run.store.write(key, data.replace(b'"metrics"', b'"metricz"'))
    async with trainer() as run:
        run.run_freely()
        await run.send(2, 0, 1)
        await run.commit(3)
    assert (await commit_chain(run.store, RUN))[:3] == before
