"""A member's work on the device: fragments first, pieces of the batch when there are none.

What a piece needs is fetched while the device does something else. A fragment of a version that
is not in use yet waits for it; one of an older version goes back.
"""

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from services.trainer.batch.fetcher import AdmittedGroup, GroupFetcher
from services.trainer.fluid.protocols import FluidDevice
from services.trainer.fluid.state import MemberState
from shared.devices.conditions import EncodedConditions, FragmentQueue, QueuedFragment
from shared.devices.protocols import Generated, GeneratingDevice, GroupData
from shared.devices.publisher import FragmentPublisher
from shared.errors import ContractError, DigenRLError, OutOfMemory, Untrainable
from shared.messages import subjects
from shared.messages.contracts import GenerateFragment, TrainGroup
from shared.messages.fluid import PieceReleased, PieceTrained, TrainPiece
from shared.messages.staleness import check_task
from shared.messages.workers import MemoryShortage
from shared.process.worker import WorkerContext, patiently
from shared.telemetry import STAGE_SECONDS

DRAIN_S = 2.0
KEPT_GROUPS = 3
"""Groups whose data stay at hand: pieces of one group follow one another."""
IN_STORE = 2
"""Results that are stored at a time, while the device works on the next fragment."""

log = structlog.get_logger()

Attempt = tuple[int, int, int]
"""Batch, group and attempt."""


@dataclass(slots=True)
class QueuedPiece:
    message: TrainPiece
    group: "asyncio.Task[AdmittedGroup | None]"


class DeviceWork:
    """Does what the scheduler gives this member, one thing at a time."""

    def __init__(
        self,
        device: FluidDevice,
        generator: GeneratingDevice,
        state: MemberState,
        context: WorkerContext,
        fetcher: GroupFetcher,
        publisher: FragmentPublisher,
        encoded: EncodedConditions | None,
        *,
        by_group: bool,
    ) -> None:
        self._device = device
        self._generator = generator
        self._state = state
        self._bus = context.bus
        self._worker = context.worker
        self._fetcher = fetcher
        self._publisher = publisher
        self._by_group = by_group
        self._fragments = FragmentQueue(
            self._worker, encoded, wake=self.wake, is_stale=self._is_stale
        )
        self._early: list[QueuedFragment] = []
        """Fragments of a version that is not in use yet."""
        self._current: GenerateFragment | None = None
        self._pieces: deque[QueuedPiece] = deque()
        self._groups: dict[Attempt, asyncio.Task[AdmittedGroup | None]] = {}
        self._storing = asyncio.Semaphore(IN_STORE)

    def wake(self) -> None:
        self._state.available.set()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_fragments(tasks))
                tasks.create_task(self._follow_pieces(tasks))
                await self._work(tasks)
        finally:
            await self._drain()

    async def _follow_fragments(self, tasks: asyncio.TaskGroup) -> None:
        subject = subjects.tasks_for(self._bus.run, self._worker.address)
        async for received in self._bus.follow(subjects.TASK, [subject]):
            if isinstance(received.message, GenerateFragment):
                self._fragments.put(received.message, tasks)

    async def _follow_pieces(self, tasks: asyncio.TaskGroup) -> None:
        subject = subjects.pieces_for(self._bus.run, self._worker.address)
        async for received in self._bus.follow(subjects.FLUID, [subject]):
            message = received.message
            if isinstance(message, TrainPiece) and message.worker == self._worker.address:
                self._pieces.append(QueuedPiece(message, self._fetching(message, tasks)))
                self.wake()

    def _fetching(
        self, message: TrainPiece, tasks: asyncio.TaskGroup
    ) -> "asyncio.Task[AdmittedGroup | None]":
        piece = message.piece
        which = message.batch, piece.group, piece.attempt
        if which not in self._groups:
            fetching = tasks.create_task(self._fetched(message))
            fetching.add_done_callback(lambda _: self.wake())
            self._groups[which] = fetching
            while len(self._groups) > KEPT_GROUPS:
                del self._groups[next(iter(self._groups))]
        return self._groups[which]

    async def _fetched(self, message: TrainPiece) -> AdmittedGroup | None:
        """Return the group of a piece; None if it may not be trained, which is reported."""
        piece, run = message.piece, self._bus.run
        subject = subjects.train_subject(run, message.batch, piece.group, piece.attempt)
        stored, _ = await self._bus.stored(subjects.TRAIN, [subject])
        command = stored[0].message if stored else None
        if not isinstance(command, TrainGroup):
            return None
        admissible = (message.policy,)
        return await patiently(
            lambda: self._fetcher.admitted(command, admissible), "store_unavailable"
        )

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._state.available.clear()
            fragment = self._next_fragment()
            if fragment is not None:
                await self._generate(fragment, tasks)
            elif self._pieces and self._pieces[0].group.done():
                await self._train(self._pieces.popleft())
            else:
                await self._state.available.wait()

    def _is_stale(self, task: GenerateFragment) -> bool:
        return self._state.version > task.policy.version

    def _next_fragment(self) -> QueuedFragment | None:
        """Return the oldest fragment of the version in use, or one that goes back or has failed."""
        while self._fragments.has_ready:
            self._early.append(self._fragments.take())
        for queued in self._early:
            task = queued.task
            if task.policy == self._state.policy or self._is_stale(task):
                self._early.remove(queued)
                return queued
        return None

    async def _generate(self, queued: QueuedFragment, tasks: asyncio.TaskGroup) -> None:
        task = queued.task
        self._current = task
        async with self._state.lock:
            generated = await self._generated(queued)
        if generated is not None:
            await self._storing.acquire()
            tasks.create_task(self._store(queued, generated))
        self._current = None

    async def _generated(self, queued: QueuedFragment) -> Generated | None:
        """Generate a fragment; None if it was given back instead."""
        task = queued.task
        try:
            if queued.fault is not None:
                raise queued.fault
            check_task(task, max_staleness=0)
            if task.policy != self._state.policy:
                await self._publisher.release(task, "stale")
                return None
            with self._worker.doing("generating"):
                given = queued.conditions
                work = await self._generator.begin(task, None if given is None else given.packed)
                self._publisher.prepare(task)
                while not work.done:
                    await work.advance()
                return await work.finish()
        except DigenRLError as error:
            await self._publisher.fail(task, error)
            return None

    async def _store(self, queued: QueuedFragment, generated: Generated) -> None:
        try:
            await self._publisher.publish(queued.task, generated, queued.conditions)
        finally:
            self._storing.release()

    async def _train(self, queued: QueuedPiece) -> None:
        """Add a piece to the sum, if the scheduler still counts on it."""
        message, group = queued.message, queued.group.result()
        async with self._state.lock:
            ledger = self._state.ledger
            if message.policy != self._state.policy or not ledger.begin_piece(message):
                return
            if ledger.is_empty:
                self._device.begin()
            if group is None or ledger.is_spoilt:
                await self._release(message, "faulty" if group is None else "failed")
                return
            began = time.monotonic()
            try:
                await self._add(message, group)
            except (ContractError, OutOfMemory) as error:
                await self._failed(message, group, error)
                return
            ledger.add(message.piece)
        seconds = 0.0 if group.work is None else time.monotonic() - began
        STAGE_SECONDS.labels(stage="trainer").observe(seconds)
        self._worker.num_done += 1
        await self._bus.publish(PieceTrained(**_about(message), seconds=seconds))

    async def _add(self, message: TrainPiece, group: AdmittedGroup) -> None:
        if isinstance(group.work, GroupData):
            with self._worker.doing("training"):
                shortage = await self._device.train(group.work, message.piece)
            self._worker.note_shortage(shortage)
        else:
            await self._device.skip(message.piece)

    async def _failed(
        self, message: TrainPiece, group: AdmittedGroup, error: ContractError | OutOfMemory
    ) -> None:
        """Report a piece that is not in the sum, or only in part."""
        is_partly_in = isinstance(error, Untrainable | OutOfMemory) and not self._by_group
        self._state.ledger.is_spoilt = is_partly_in
        if isinstance(error, OutOfMemory):
            shortage = MemoryShortage.of(error, "its pieces are trained by others")
            self._worker.note_shortage(shortage)
        else:
            await self._fetcher.fail(group.command, error)
        is_at_fault = not (is_partly_in or isinstance(error, OutOfMemory))
        await self._release(message, "faulty" if is_at_fault else "failed")

    async def _release(
        self, message: TrainPiece, reason: Literal["draining", "failed", "faulty"]
    ) -> None:
        log.info("piece_released", batch=message.batch, piece=str(message.piece), reason=reason)
        await self._bus.publish(PieceReleased(**_about(message), reason=reason))

    async def _drain(self) -> None:
        """Give back what is not done, so that others need not wait until this one is missed."""
        left = [] if self._current is None else [self._current]
        left += self._fragments.remove(lambda _: True) + [each.task for each in self._early]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                for task in left:
                    await self._publisher.release(task, "draining")
                for queued in self._pieces:
                    await self._release(queued.message, "draining")


def _about(message: TrainPiece) -> dict[str, Any]:
    """Return what all messages about a piece say."""
    return {
        "batch": message.batch,
        "attempt": message.attempt,
        "worker": message.worker,
        "piece": message.piece,
        "sum_number": message.sum_number,
    }
