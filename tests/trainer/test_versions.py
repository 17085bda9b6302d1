"""What a version's record says of the states that a resume begins with."""

import asyncio
from pathlib import Path

import msgpack

from bench.cluster.blobs import BytesPart
from services.trainer.versions import NewVersion, Versions
from shared.bus.bus import Bus
from shared.devices.protocols import Snapshot
from shared.messages.codec import decode
from shared.messages.contracts import TrainGroup
from shared.process.worker import Worker, WorkerContext
from shared.run.commits import CommitRecord
from shared.run.layout import commit_key
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests.shared.messages.test_mutations import MESSAGES

RUN = "run"


class HeldCommit(FolderBackend):
    """Holds the record of one version back until the test lets it go."""

    def __init__(self, root: Path, version: int) -> None:
        super().__init__(root)
        self._held = commit_key(RUN, version)
        self.reached, self.let_go = asyncio.Event(), asyncio.Event()

    async def create(self, key: str, data: bytes) -> bool:
        if key == self._held:
            self.reached.set()
            await self.let_go.wait()
        return await super().create(key, data)


def snapshot(version: int) -> Snapshot:
    data = bytes([version])
    return Snapshot(f"{version:064x}", [BytesPart(data)], [BytesPart(data)])


async def test_a_commit_forgets_no_states_that_are_stored_while_it_is_written(
    tmp_path: Path, nats_url: str
) -> None:
    """One step ahead, or with states that follow their commit, both are written at a time."""
    backend = HeldCommit(tmp_path, version=2)
    messages = (decode(msgpack.packb(each)) for each in MESSAGES.values())
    group = next(each for each in messages if isinstance(each, TrainGroup))
    worker = Worker("trainer", "trainer", "waiting_for_rollout")
    worker.address = "trainer-0"
    async with Bus.connect(nats_url, run=RUN, name="test") as bus:
        versions = Versions(WorkerContext(bus, ObjectStore(backend), worker))

        def after(parent: CommitRecord) -> NewVersion:
            weights = snapshot(parent.policy.version + 1)
            return NewVersion(weights, parent, commands=(group,), with_states=False)

        first = await versions.commit(NewVersion(snapshot(0)))
        second = await versions.commit(after(first))
        held = asyncio.create_task(versions.commit(after(second)))
        await backend.reached.wait()
        await versions.add_states(second, snapshot(1))
        backend.let_go.set()
        third = await held
        assert third.resumes_from == 0  # what it was written with
        assert (await versions.commit(after(third))).resumes_from == 1
