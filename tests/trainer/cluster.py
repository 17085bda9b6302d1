"""A trainer over devices without torch, on a real bus."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from services.trainer.app import TrainerApp
from services.trainer.batch.fetcher import CheckStored
from shared.bus.bus import Bus
from shared.devices.conditions import EncodedConditions
from shared.devices.protocols import Training
from shared.messages import subjects
from shared.messages.contracts import (
    FragmentScored,
    Message,
    Policy,
    PolicyPublished,
    SetDevice,
    TrainGroup,
    Trajectories,
)
from shared.messages.workers import Device, DeviceMode
from shared.process.worker import Worker, WorkerContext
from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord, commit, read_commit, record_digest
from shared.run.conditions import Encoding
from shared.run.layout import batch_folder, commit_key
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from shared.store.objects import Content
from tests import examples
from tests.trainer.fakes import FakeTraining, digest_of

RUN = "test"
ADDRESS = "trainer-0"
WAIT_S = 20.0
M = TypeVar("M", bound=Message)


class Backend(FolderBackend):
    """A folder that holds back the commit record of one version, or stops at a write for ever: what
    then ends has been killed there."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.held_back: int | None = None
        self.given = asyncio.Event()
        self.keys_read: list[str] = []
        self.stops_at: str | None = None
        """Part of the key."""
        self.stops_after = False
        """Whether it is written."""
        self.has_stopped = asyncio.Event()

    async def write(self, key: str, data: Content) -> None:
        stops = self.stops_at is not None and self.stops_at in key
        if not stops or self.stops_after:
            await super().write(key, data)
        if stops:
            await self._stop()

    async def _stop(self) -> None:
        self.has_stopped.set()
        await asyncio.Event().wait()

    async def create(self, key: str, data: bytes) -> bool:
        if self.stops_at is not None and self.stops_at in key:
            if self.stops_after:
                await super().create(key, data)
            await self._stop()
        if self.held_back is not None and key == commit_key(RUN, self.held_back):
            await self.given.wait()
        return await super().create(key, data)

    async def read(self, key: str) -> bytes | None:
        self.keys_read.append(key)
        return await super().read(key)


@dataclass
class Cluster:
    """One trainer, and the services around it as far as they matter to it."""

    bus: Bus
    backend: Backend
    training: FakeTraining
    worker: Worker
    app: TrainerApp

    @property
    def store(self) -> ObjectStore:
        return ObjectStore(self.backend)

    def run_freely(self) -> None:
        for device in self.training.devices:
            device.free.set()

    async def commit(self, version: int) -> CommitRecord:
        """Return the commit record of a version as soon as it is there."""
        async with asyncio.timeout(WAIT_S):
            while True:
                record = await read_commit(self.store, RUN, version)
                if record is not None:
                    return record
                await asyncio.sleep(0.01)

    async def commit_as_another(self, version: int) -> CommitRecord:
        """Commit a version as a trainer that was faster."""
        adapter = b"another"
        parent = await self.commit(version - 1)
        record = CommitRecord(
            run=RUN,
            policy=Policy(version=version, weights_digest=digest_of(adapter)),
            parent=record_digest(parent.encode()),
            weights=await self.store.put(f"{RUN}/weights", adapter, suffix=".safetensors"),
            checkpoint=await self.store.put(f"{RUN}/weights", b"of " + adapter, suffix=".x"),
            worker="trainer-1",
        )
        await commit(self.store, record)
        return record

    async def send(
        self,
        batch: int,
        *groups: int,
        version: int | None = None,
        attempt: int = 0,
        advantages: Sequence[float] = (1.0, -1.0, 0.5, -0.5),
        content: str | None = None,
        parts: Sequence[bytes] | None = None,
        conditions: bytes = b"conditions",
    ) -> None:
        """Groups to the trainer, by default by the version of their batch; ``parts``: what is
        stored of their two fragments."""
        policy = (await self.commit(batch if version is None else version)).policy
        for group in groups:
            names = parts or [(content or f"{batch}/{group}").encode()] * 2
            scored = [
                await self._scored(batch, group, first, policy, name, conditions)
                for first, name in zip((0, 2), names, strict=True)
            ]
            await self.bus.publish(TrainGroup(
                batch=batch,
                group=group,
                attempt=attempt,
                policy=policy,
                fragments=tuple(scored),
                advantages=tuple(advantages),
            ))  # fmt: skip

    async def _scored(
        self,
        batch: int,
        group: int,
        first: int,
        policy: Policy,
        content: bytes,
        conditions: bytes,
    ) -> FragmentScored:
        folder = batch_folder(RUN, batch)
        trajectory = examples.ref("gone")
        if content != b"gone":
            trajectory = await self.store.put(folder, content, suffix=".safetensors")
        return FragmentScored(
            fragment=examples.fragment(batch=batch, group=group, first_sample=first),
            policy=policy,
            stored=Trajectories(
                trajectory=trajectory,
                conditions=await self.store.put(folder, conditions, suffix=".safetensors"),
                media=examples.ref("media"),
                weights_digest=policy.weights_digest,
            ),
            rewards=(1.0, 0.0),
            parts={"proxy": (1.0, 0.0)},
            generated_by="rollout-0",
            worker="reward-0",
            seconds=0.1,
        )

    async def lend(self, loan_number: int) -> None:
        await self._set("generate", loan_number)

    async def call_back(self, loan_number: int, *, keep: bool = True) -> None:
        await self._set("train", loan_number, keep=keep)

    async def _set(self, mode: DeviceMode, loan_number: int, *, keep: bool = True) -> None:
        await self.bus.publish(
            SetDevice(
                worker=ADDRESS, loan_number=loan_number, mode=mode, max_seconds=30.0, keep=keep
            )
        )
        await self.until(
            lambda: self.worker.loan is not None and self.worker.loan.loan_number == loan_number
        )

    async def generate(self, batch: int, *groups: int) -> None:
        policy = (await self.commit(batch)).policy
        await self.until(lambda: self._has_announced(batch))
        for group in groups:
            task = examples.task(batch=batch, group=group)
            update = {"policy": policy, "worker": ADDRESS}
            await self.bus.publish(task.model_copy(update=update))

    def _has_announced(self, version: int) -> bool:
        """Return whether it has announced the version; before, nobody gives it tasks by that."""
        announced = self.worker.policy_version
        return announced is not None and announced >= version

    async def told(self, kind: type[M], count: int = 1) -> list[M]:
        """The first events of one kind, but for announcements of version 0."""
        found: list[M] = []
        name = kind.model_fields["kind"].default
        is_path = name == "fragment_generated"
        stream = subjects.TRAJ if is_path else subjects.EVT
        at = subjects.event_subject(RUN, name)
        filters = None if is_path else [at, f"{at}.>"]  # failures name their stage
        async with (
            asyncio.timeout(WAIT_S),
            contextlib.aclosing(self.bus.follow(stream, filters)) as events,
        ):
            async for received in events:
                event = received.message
                assert isinstance(event, kind)
                if not (isinstance(event, PolicyPublished) and event.policy.version == 0):
                    found.append(event)
                if len(found) == count:
                    break
        return found

    async def all_told(self, kind: type[Message]) -> int:
        """How many events of one kind there are by now."""
        stored, _ = await self.bus.stored(subjects.EVT)
        return sum(isinstance(received.message, kind) for received in stored)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 -- of objects that know nothing of tests
                await asyncio.sleep(0.005)

    async def log_holds(self, *entries: str) -> None:
        await self.until(lambda: set(entries) <= set(self.training.log))


@contextlib.asynccontextmanager
async def cluster(
    nats_url: str,
    folder: Path,
    recipe: Recipe,
    *,
    training: Training | None = None,
    check: CheckStored | None = None,
    encoding: Encoding | None = None,
) -> AsyncIterator[Cluster]:
    async with Bus.connect(nats_url, run=RUN, name="test") as bus:
        await bus.ensure_streams()
        backend, fake = Backend(folder), FakeTraining(recipe.trainer.devices)
        worker = Worker("trainer", "trainer", "waiting_for_rollout", Device(), address=ADDRESS)
        store = ObjectStore(backend)
        context = WorkerContext(bus, store, worker)
        app = TrainerApp(
            training or fake, recipe, context,
            generators=() if training else fake.devices,
            encoded=EncodedConditions(store, RUN, encoding) if encoding else None, check=check,
        )  # fmt: skip
        made = Cluster(bus, backend, fake, worker, app)
        running = asyncio.create_task(app.run())
        watching = asyncio.create_task(made.commit(0))
        try:
            await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
            yield made
        finally:
            watching.cancel()
            running.cancel()
            await asyncio.wait({running})
        if not running.cancelled():
            await running


Start = Callable[..., contextlib.AbstractAsyncContextManager[Cluster]]
"""``trainer(trainer__devices=2)`` starts one with this change to its recipe."""
