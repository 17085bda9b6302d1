"""What each of the trainer's devices does next.

One device trains whatever is ready before it generates, so that rollout never waits for it. Of
several devices each finishes the fragments that there are first, unbroken, and otherwise trains the
next piece of a group, whatever the others do. Either way a device changes over between two
denoising steps at the latest, and a commit takes all of them.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from services.trainer.devices.device import Lane, QueuedGroup, QueuedSlice, QueuedSlices
from services.trainer.devices.loan_agent import Helper
from shared.process.worker import Worker


class Lanes:
    def __init__(
        self, lanes: Sequence[Lane], worker: Worker, helper: Helper | None, *, trained_steps: int
    ) -> None:
        self._lanes = lanes
        self._worker = worker
        self._helper = helper
        self._pieces = QueuedSlices(len(lanes), trained_steps)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for lane in self._lanes:
                tasks.create_task(self._work(lane))

    async def train(self, group: QueuedGroup) -> None:
        """Give the lanes a group as soon as they have taken all that came before it."""
        await self._pieces.room()
        self._pieces.put(group)
        for lane in self._lanes:
            lane.something.set()

    def drop(self) -> None:
        """Nothing more of what is waiting is trained. A piece that a lane is at goes on."""
        self._pieces.clear()

    @contextlib.asynccontextmanager
    async def all_held(self) -> AsyncIterator[None]:
        """Every device, for the trainer alone."""
        async with contextlib.AsyncExitStack() as stack:
            for lane in self._lanes:
                await stack.enter_async_context(lane.lock)
            for lane in self._lanes:
                stack.enter_context(lane.use.use("training"))
            yield

    async def _work(self, lane: Lane) -> None:
        while True:
            await lane.something.wait()
            lane.something.clear()
            while await self._act(lane):
                pass

    async def _act(self, lane: Lane) -> bool:
        """One piece of training, or one denoising step; False if there is neither."""
        async with lane.lock:
            helper = self._helper
            generates = helper is not None and helper.may_go_on(lane)
            piece = None if generates and len(self._lanes) > 1 else self._pieces.take()
            if piece is not None:
                await self._train(lane, piece)
            elif helper is not None and generates:
                await helper.go_on(lane)
            return piece is not None or generates

    async def _train(self, lane: Lane, piece: QueuedSlice) -> None:
        with self._worker.doing("training"), lane.use.use("training"), piece.training():
            await lane.trains.accumulate(piece.group.data, piece.group_slice)
