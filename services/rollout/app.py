"""The rollout worker: generates the fragments that it is given, stores and reports the results.

The service is stateless: all it holds can be rebuilt, and the scheduler gives its unfinished work
to another worker. After its denoising steps, a fragment is decoded and packed concurrently with the
steps of the next one, one fragment at a time. Weights are staged concurrently with generation and
put in use between two fragments; a fragment of a version that is superseded before it begins is
returned. With encoders, a fragment waits until its prompt's conditions are here.
"""

import asyncio
import contextlib
from collections.abc import Awaitable

import structlog

from services.rollout import limits
from services.rollout.policy_loader import PolicyLoader
from shared.devices.conditions import EncodedConditions, FragmentQueue, QueuedFragment
from shared.devices.protocols import FragmentGeneration, GeneratedFragment, RolloutDevice
from shared.devices.publisher import FragmentPublisher
from shared.errors import DigenRLError
from shared.messages import subjects
from shared.messages.contracts import GenerateFragment
from shared.messages.staleness import check_task
from shared.process.worker import WorkerContext
from shared.run.previews import PreviewRule
from shared.run.sources import SourceImages
from shared.run.versions import VersionIndex

log = structlog.get_logger()


class RolloutApp:
    def __init__(
        self,
        device: RolloutDevice,
        context: WorkerContext,
        index: VersionIndex,
        *,
        max_staleness: int,
        encoded: EncodedConditions | None = None,
        lossless: bool = False,
        previews: PreviewRule | None = None,
    ) -> None:
        """``encoded``: where conditions come from, if the device does not encode. ``lossless``:
        media are stored packed (`Rollout.media`); ``previews``: which samples have small pictures
        that stay."""
        self._device = device
        self._bus = context.bus
        self._worker = context.worker
        self._max_staleness = max_staleness
        self._work_available = asyncio.Event()
        """Set when there may be work for the device."""
        self._loader = PolicyLoader(device, context, index)
        self._publisher = FragmentPublisher(
            device, context, encoded=encoded, lossless=lossless, previews=previews
        )
        self._waiting = FragmentQueue(
            self._worker, encoded, SourceImages(context.store, context.bus),
            wake=self._work_available.set, is_stale=self._is_stale,
        )  # fmt: skip
        self._current: GenerateFragment | None = None
        self._decoding = asyncio.Semaphore(1)
        """Held while a fragment is decoded and packed, and until one more may be stored."""
        self._decoded: GenerateFragment | None = None
        """The fragment that is decoded."""
        self._storing = asyncio.Semaphore(limits.MAX_PENDING_RESULTS)

    async def run(self) -> None:
        await self._bus.wait_for_streams()
        self._worker.rest()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(tasks))
                tasks.create_task(self._loader.follow())
                tasks.create_task(self._worker.report(self._bus))
                tasks.create_task(self._work(tasks))
        finally:
            await self._drain()

    async def _receive(self, tasks: asyncio.TaskGroup) -> None:
        subject = subjects.tasks_for(self._bus.run, self._worker.address)
        async for received in self._bus.follow(subjects.TASK, [subject]):
            task = received.message
            if isinstance(task, GenerateFragment):
                self._loader.prestage(task.policy, task.weights)
                self._waiting.put(task, tasks)

    def _is_stale(self, task: GenerateFragment) -> bool:
        return self._loader.newest > task.policy.version

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            if self._waiting.has_ready:
                await self._generate(tasks)
            else:
                self._work_available.clear()
                await self._work_available.wait()

    async def _generate(self, tasks: asyncio.TaskGroup) -> None:
        """Generate the fragment that has waited longest; decoding and storing run concurrently with
        the next fragment."""
        queued = self._waiting.take()
        self._current = queued.task
        finishing = await self._denoised(queued)
        if finishing is not None:
            self._decoded = queued.task
            tasks.create_task(self._finish(queued, finishing))
        self._current = None

    async def _denoised(self, queued: QueuedFragment) -> Awaitable[GeneratedFragment] | None:
        """Take all denoising steps of a fragment, and the turn to decode; None if it was given
        back instead."""
        task = queued.task
        try:
            if queued.fault is not None:
                raise queued.fault
            check_task(task, max_staleness=self._max_staleness)
            if not await self._loader.adopt(task.policy, task.weights):
                await self._publisher.release(task, "stale")
                return None
            with self._worker.doing("generating"):
                work = await self._with_steps(queued)
            return await self._in_turn(work)
        except DigenRLError as error:
            await self._publisher.fail(task, error)
            return None

    async def _finish(
        self, queued: QueuedFragment, finishing: Awaitable[GeneratedFragment]
    ) -> None:
        """Decode, pack and store a fragment."""
        generated = None
        try:
            with self._worker.progress.running("decoding"):
                generated = await finishing
            await self._storing.acquire()
        except DigenRLError as error:
            await self._publisher.fail(queued.task, error)
        self._decoded = None
        self._decoding.release()
        if generated is None:
            return
        try:
            await self._publisher.publish(queued.task, generated, queued.conditions)
        finally:
            self._storing.release()

    async def _with_steps(self, queued: QueuedFragment) -> FragmentGeneration:
        given = queued.conditions
        packed = None if given is None else given.packed
        work = await self._device.begin(queued.task, packed, queued.source)
        self._publisher.prepare(queued.task)
        while not work.done:
            await work.advance()
        return work

    async def _in_turn(self, work: FragmentGeneration) -> Awaitable[GeneratedFragment]:
        """Decode a fragment once the one before is decoded, and a store slot is free."""
        with self._worker.lacking("generating", "waits until the fragment before is stored"):
            await self._decoding.acquire()
        try:
            return work.finish()
        except BaseException:
            self._decoding.release()
            raise

    async def _drain(self) -> None:
        """Give back what is not done, so that others need not wait for this worker's lease."""
        left = [task for task in (self._decoded, self._current) if task is not None]
        left += self._waiting.remove(lambda _: True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.DRAIN_S):
                for task in left:
                    await self._publisher.release(task, "draining")
