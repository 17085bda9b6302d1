"""A rollout worker over a device that only notes what it is told to do, on a real bus."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.cluster.blobs import joined
from services.rollout.app import RolloutApp
from shared.bus.bus import Bus
from shared.devices.conditions import EncodedConditions
from shared.devices.protocols import GeneratedFragment, RolloutDevice
from shared.errors import DigenRLError, FaultyConditions, Unavailable
from shared.messages import subjects
from shared.messages.contracts import GenerateFragment, Message, ObjectRef
from shared.messages.records import WeightsChange
from shared.messages.workers import Device
from shared.process.worker import Worker, WorkerContext
from shared.run.commits import commit, record_digest
from shared.run.conditions import Encoding
from shared.run.manifest import StoredTensors
from shared.store import ObjectStore
from shared.store.backend import Content
from shared.store.folder import FolderBackend
from tests import examples

RUN = "test"
ADDRESS = "rollout-0"
WAIT_S = 20.0


@dataclass
class FakeGeneration:
    device: "FakeDevice"
    task: GenerateFragment
    done: bool = False
    seconds: float = 0.0

    async def advance(self) -> None:
        async with self.device.used_for(f"fragment {self.task.fragment.group}"):
            self.done, self.seconds = True, 0.25

    def finish(self) -> Awaitable[GeneratedFragment]:
        group, device = self.task.fragment.group, self.device
        return device.decoded(group, GeneratedFragment(
            str(group).encode(), str(group).encode(), device.digest, self.seconds
        ))  # fmt: skip


@dataclass
class FakeStaged:
    device: "FakeDevice"
    digest: str

    async def adopt(self) -> None:
        self.device.digest = self.digest


@dataclass
class FakeDevice:
    """Its weights are objects that hold their digest."""

    done: list[str] = field(default_factory=list)
    """Names what it has done, in order, and by which version."""
    begun: list[str] = field(default_factory=list)
    free: asyncio.Event = field(default_factory=asyncio.Event)
    """Set unless a test holds the device back: until it is set again, everything takes for ever."""
    staging_fault: DigenRLError | None = None
    """Error of the next weights that are staged."""
    digest: str = ""
    decodes: asyncio.Event = field(default_factory=asyncio.Event)
    """Set unless a test holds decoding back."""
    decoding: list[int] = field(default_factory=list)
    """Groups of the fragments that it has begun to decode."""
    decoding_fault: DigenRLError | None = None
    """Error of the next fragment that is decoded."""
    given: list[bytes | None] = field(default_factory=list)
    """Conditions that its fragments were begun with."""
    sources: list[bytes | None] = field(default_factory=list)
    """Source images that its fragments were begun with."""
    _used: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.free.set()
        self.decodes.set()

    async def decoded(self, group: int, generated: GeneratedFragment) -> GeneratedFragment:
        self.decoding.append(group)
        await self.decodes.wait()
        fault, self.decoding_fault = self.decoding_fault, None
        if fault is not None:
            raise fault
        return generated

    @contextlib.asynccontextmanager
    async def used_for(self, what: str) -> AsyncIterator[None]:
        assert not self._used.locked(), "a device does one thing at a time"
        async with self._used:
            self.begun.append(what)
            await self.free.wait()
            yield
            self.done.append(f"{what} by {int(self.digest, 16)}")

    def weights_digest(self) -> str:
        return self.digest

    async def begin(
        self, task: GenerateFragment, conditions: bytes | None = None, source: bytes | None = None
    ) -> FakeGeneration:
        if conditions == b"not what the network takes":
            raise FaultyConditions("not conditions")
        self.given.append(conditions)
        self.sources.append(source)
        return FakeGeneration(self, task)

    async def conditions(
        self, prompt: str, source: bytes | None = None, negative: str | None = None
    ) -> bytes:
        return prompt.encode()

    async def stage(self, weights: StoredTensors) -> FakeStaged:
        fault, self.staging_fault = self.staging_fault, None
        if fault is not None:
            raise fault
        return FakeStaged(self, (await joined(weights)).decode())


class Backend(FolderBackend):
    """A folder that is away, or slow to give one object, when a test wants it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.outages = 0
        """Calls that are still to fail."""
        self.held_back: str | None = None
        """Key that is not given yet."""
        self.given = asyncio.Event()
        self.written: list[str] = []
        """Keys, as often as they were."""

    async def write(self, key: str, data: Content) -> None:
        self._answer()
        self.written.append(key)
        await super().write(key, data)

    async def read(self, key: str) -> bytes | None:
        self._answer()
        if key == self.held_back:
            await self.given.wait()
        return await super().read(key)

    def _answer(self) -> None:
        if self.outages:
            self.outages -= 1
            raise Unavailable("the store is away")


class EmptyIndex:
    """What it does not know is looked up in the commit records."""

    async def lookup(self, number: int) -> None:
        return None


@dataclass
class Cluster:
    """One worker, and the services around it as far as they matter to it."""

    bus: Bus
    backend: Backend
    device: FakeDevice
    app: RolloutApp
    worker: Worker
    running: "asyncio.Task[None]"
    parent: str | None = None

    @property
    def store(self) -> ObjectStore:
        return ObjectStore(self.backend)

    async def publish_version(
        self, number: int, *, announce: bool = True, trained: str | None = None,
        change: WeightsChange | None = None,
    ) -> None:  # fmt: skip
        """``trained``: digest of the trained weights, if they are not those that generate."""
        weights = await self.weights(examples.digest(number))
        weights = weights.model_copy(update={"change": change})
        record = examples.record(
            number, run=RUN, parent=self.parent, weights=weights, trained_digest=trained,
            trained_weights=None if trained is None else await self.weights(trained),
            checkpoint=weights,
        )  # fmt: skip
        await commit(self.store, record)
        self.parent = record_digest(record.encode())
        if announce:
            await self.bus.publish(examples.published(number, weights=weights))

    async def weights(self, digest: str) -> ObjectRef:
        return await self.store.put(f"{RUN}/weights", digest.encode(), suffix=".safetensors")

    async def generate(
        self, *groups: int, version: int = 0, weights: ObjectRef | None = None
    ) -> None:
        """``weights``: where those are of a version that is not committed."""
        policy = examples.policy(version)
        for group in groups:
            task = examples.task(batch=version, group=group, policy=policy, weights=weights)
            await self.bus.publish(task)

    async def told(self, kind: str, count: int = 1) -> Sequence[Message]:
        """The first events of one kind."""
        is_result, at = kind == "fragment_generated", subjects.event_subject(RUN, kind)
        stream = subjects.TRAJ if is_result else subjects.EVT
        filters = None if is_result else [at, f"{at}.>"]  # failures name their stage
        found: list[Message] = []
        async with (
            asyncio.timeout(WAIT_S),
            contextlib.aclosing(self.bus.follow(stream, filters)) as s,
        ):
            async for received in s:
                assert received.message is not None
                found.append(received.message)
                if len(found) == count:
                    break
        return found

    async def drain(self) -> None:
        self.running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.running


Start = Callable[..., contextlib.AbstractAsyncContextManager[Cluster]]


@contextlib.asynccontextmanager
async def cluster(
    nats_url: str,
    folder: Path,
    *,
    max_staleness: int = 0,
    device: RolloutDevice | None = None,
    encoding: Encoding | None = None,
) -> AsyncIterator[Cluster]:
    """Run a worker with version 0 published, whose weights mean something to a `FakeDevice` alone.

    ``encoding``: how encoders make the conditions, if the device does not.
    """
    async with Bus.connect(nats_url, run=RUN, name="test") as bus:
        await bus.ensure_streams()
        backend, fake = Backend(folder), FakeDevice()
        worker = Worker("rollout", "rollout", "waiting_for_trainer", Device(), address=ADDRESS)
        store = ObjectStore(backend)
        app = RolloutApp(
            device or fake, WorkerContext(bus, store, worker),
            EmptyIndex(),  # type: ignore[arg-type]
            max_staleness=max_staleness,
            encoded=EncodedConditions(store, RUN, encoding) if encoding else None,
        )  # fmt: skip
        made = Cluster(bus, backend, fake, app, worker, asyncio.create_task(app.run()))
        await made.publish_version(0)
        yield made
        await made.drain()
