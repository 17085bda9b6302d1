"""The rollout worker: generates the fragments that it is given, stores and reports the result.

Stateless: whatever it holds can be made anew, and the scheduler gives to another worker what this
one leaves undone. Weights are staged beside generation and put in use between two fragments; a
fragment of a version that is superseded before it is begun goes back.
"""

import asyncio
import contextlib

import structlog

from services.rollout.engine import RolloutEngine
from services.rollout.weights import Weights
from shared import subjects
from shared.admission import check_task
from shared.bus import Bus
from shared.contracts import GenerateFragment
from shared.diffusion.generation import Generated
from shared.diffusion.publishing import FragmentPublisher
from shared.errors import DigenRLError, Unavailable
from shared.store import ObjectStore
from shared.versions import VersionIndex
from shared.worker import Worker

IN_STORE = 2
"""While one fragment's result is stored, the device works on the next."""
RETRY_S = 0.5
DRAIN_S = 2.0

log = structlog.get_logger()


class RolloutApp:
    def __init__(
        self,
        engine: RolloutEngine,
        bus: Bus,
        store: ObjectStore,
        index: VersionIndex,
        worker: Worker,
        *,
        max_staleness: int,
        slowdown: float = 1.0,
    ) -> None:
        self._engine = engine
        self._bus = bus
        self._worker = worker
        self._weights = Weights(engine, bus, store, index, worker)
        self._publisher = FragmentPublisher(engine, bus, store, worker)
        self._max_staleness = max_staleness
        self._slowdown = slowdown
        self._tasks: asyncio.Queue[GenerateFragment] = asyncio.Queue()
        self._current: GenerateFragment | None = None
        self._storing = asyncio.Semaphore(IN_STORE)

    async def run(self) -> None:
        await self._bus.wait_for_streams()
        self._worker.activity = self._worker.idle
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive())
                tasks.create_task(self._weights.follow())
                tasks.create_task(self._worker.report(self._bus))
                tasks.create_task(self._work(tasks))
        finally:
            await self._drain()

    async def _receive(self) -> None:
        subject = subjects.tasks_for(self._bus.run, self._worker.address)
        async for received in self._bus.follow(subjects.TASK, [subject]):
            if isinstance(received.message, GenerateFragment):
                self._tasks.put_nowait(received.message)

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._current = task = await self._tasks.get()
            try:
                if self._weights.newest > task.policy.version:
                    await self._publisher.release(task, "stale")
                    continue
                generated = await self._generated(task)
            except DigenRLError as error:
                await self._publisher.fail(task, error)
                continue
            await self._storing.acquire()
            self._current = None
            tasks.create_task(self._store(task, generated))

    async def _store(self, task: GenerateFragment, generated: Generated) -> None:
        try:
            await self._publisher.publish(task, generated)
        finally:
            self._storing.release()

    async def _generated(self, task: GenerateFragment) -> Generated:
        check_task(task, max_staleness=self._max_staleness)
        while True:
            try:
                await self._weights.adopt(task.policy)
                break
            except Unavailable as error:
                log.warning("weights_unavailable", error=str(error))
                await asyncio.sleep(RETRY_S)
        with self._worker.doing("generating"):
            return await self._denoised(task)

    async def _denoised(self, task: GenerateFragment) -> Generated:
        work = await asyncio.to_thread(self._engine.begin, task)
        while not work.done:
            before = work.seconds
            await asyncio.to_thread(self._engine.advance, work)
            if self._slowdown > 1:
                extra = (work.seconds - before) * (self._slowdown - 1)
                await asyncio.sleep(extra)
                work.seconds += extra
        return await asyncio.to_thread(self._engine.finish, work)

    async def _drain(self) -> None:
        """Give back what is not done, so that others need not wait for this worker's lease."""
        left = [] if self._current is None else [self._current]
        while not self._tasks.empty():
            left.append(self._tasks.get_nowait())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                for task in left:
                    await self._publisher.release(task, "draining")
