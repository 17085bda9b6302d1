"""Computes gradients of whole groups on a rollout device, while the trainer is behind.

A group's tensors are fetched while the device does something else; then its gradient is computed
at the weights that its batch is trained from, stored in the batch's folder, and reported. What
this device cannot or need not compute goes back to the scheduler, which has it done elsewhere.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import structlog
from pydantic import ValidationError

from services.rollout.policy_loader import PolicyLoader
from shared.devices.protocols import GroupData, GroupGradient, RolloutDevice
from shared.errors import ContractError, DigenRLError, OutOfMemory
from shared.messages import subjects
from shared.messages.contracts import (
    ComputeGradient,
    GradientComputed,
    GradientReleased,
    GroupGradientRef,
)
from shared.messages.staleness import check_admission
from shared.messages.workers import MemoryShortage
from shared.process.worker import WorkerContext, patiently
from shared.run.commits import admissible_versions
from shared.run.layout import batch_folder
from shared.telemetry import STAGE_SECONDS

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FetchedGroup:
    command: ComputeGradient
    data: GroupData


class Gradients:
    def __init__(
        self,
        device: RolloutDevice,
        loader: PolicyLoader,
        context: WorkerContext,
        *,
        max_staleness: int,
        wake: Callable[[], None],
    ) -> None:
        """``wake`` is called whenever a group has become ready for `compute`."""
        self._device = device
        self._loader = loader
        self._bus = context.bus
        self._store = context.store
        self._worker = context.worker
        self._max_staleness = max_staleness
        self._wake = wake
        self._held: list[ComputeGradient] = []
        """Groups that are neither reported nor given back."""
        self.ready: deque[FetchedGroup] = deque()

    async def follow(self, tasks: asyncio.TaskGroup) -> None:
        """Fetch each group that is given to this device, for ever."""
        subject = subjects.gradients_for(self._bus.run, self._worker.address)
        async for received in self._bus.follow(subjects.GRAD, [subject]):
            if isinstance(received.message, ComputeGradient):
                self._held.append(received.message)
                tasks.create_task(self._fetch(received.message))

    async def compute(self, tasks: asyncio.TaskGroup) -> None:
        """Compute the gradient of the group that is ready; it is stored beside what the device
        does next."""
        fetched = self.ready.popleft()
        command = fetched.command
        try:
            if not await self._loader.adopt(command.policy):
                await self._release(command, "stale")
                return
            trained = await self._loader.trained(command.policy)
            began = time.monotonic()
            with self._worker.doing("training"):
                part = await self._device.gradient(fetched.data, trained)
            seconds = time.monotonic() - began
        except DigenRLError as error:
            if isinstance(error, OutOfMemory):
                self._worker.note_shortage(MemoryShortage.of(error, "computes no gradients"))
            await self._fail(command, error)
            return
        self._worker.note_shortage(part.shortage)
        tasks.create_task(self._publish(command, part, seconds))

    async def drain(self) -> None:
        """Give back what is not done."""
        for command in list(self._held):
            await self._release(command, "draining")

    async def _fetch(self, command: ComputeGradient) -> None:
        try:
            data = await patiently(lambda: self._data(command), "store_unavailable")
        except DigenRLError as error:
            await self._fail(command, error)
            return
        self.ready.append(FetchedGroup(command, data))
        self._wake()

    async def _data(self, command: ComputeGradient) -> GroupData:
        """Fetch the group's tensors, if it may be trained."""
        group = command.group
        admissible = await admissible_versions(
            self._store, self._bus.run, command.policy, self._max_staleness
        )
        for fragment in group.fragments:
            check_admission(fragment, group, admissible)
        stored = [fragment.stored for fragment in group.fragments]
        objects = [*(each.trajectory for each in stored), stored[-1].conditions]
        *trajectories, conditions = await asyncio.gather(*map(self._store.get, objects))
        return GroupData(
            trajectories=tuple(trajectories),
            conditions=conditions,
            advantages=group.advantages,
            staleness=group.batch - group.policy.version,
        )

    async def _publish(self, command: ComputeGradient, part: GroupGradient, seconds: float) -> None:
        STAGE_SECONDS.labels(stage="gradient").observe(seconds)
        try:
            first = await patiently(
                lambda: self._stored(command, part, seconds), "store_unavailable"
            )
        except DigenRLError as error:
            await self._fail(command, error)
            return
        self._held.remove(command)
        self._worker.num_done += first

    async def _stored(self, command: ComputeGradient, part: GroupGradient, seconds: float) -> bool:
        """Store and report it; False if the group's gradient is reported already."""
        group = command.group
        folder = batch_folder(self._bus.run, group.batch)
        gradient = await self._store.put(folder, part.gradient, suffix=".gradient.safetensors")
        try:
            contribution = GroupGradientRef(
                gradient=gradient, tally=dict(part.tally), worker=self._worker.address
            )
        except ValidationError as error:
            raise ContractError(f"what the device says of its gradient: {error}") from error
        return await self._bus.publish(
            GradientComputed(
                **group.answer_fields,
                policy=command.policy,
                contribution=contribution,
                seconds=seconds,
            )
        )

    async def _fail(self, command: ComputeGradient, error: DigenRLError) -> None:
        if self._loader.newest > command.policy.version:  # its objects may be gone
            await self._release(command, "stale")
            return
        log.error("gradient_failed", slot=_slot(command), error=str(error))
        await self._release(command, "failed")

    async def _release(
        self, command: ComputeGradient, reason: Literal["stale", "draining", "failed"]
    ) -> None:
        log.info("gradient_released", slot=_slot(command), reason=reason)
        await self._bus.publish(
            GradientReleased(
                **command.group.answer_fields, worker=self._worker.address, reason=reason
            )
        )
        self._held.remove(command)


def _slot(command: ComputeGradient) -> str:
    group = command.group
    return f"batch={group.batch} group={group.group} attempt={group.attempt}"
