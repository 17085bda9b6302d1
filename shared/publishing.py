"""From a generated fragment to the message that names it: store first, then publish.

The same for a rollout worker and for a trainer's device that is lent to generation.
"""

import asyncio
from typing import Literal

import structlog

from shared.bus import Bus
from shared.contracts import (
    FragmentFailed,
    FragmentGenerated,
    FragmentReleased,
    GenerateFragment,
    ObjectRef,
    Trajectories,
)
from shared.engines import Generated, GeneratingDevice
from shared.errors import DigenRLError, SlotPoisoned, Unavailable
from shared.run_store import batch_folder, conditions_folder
from shared.store import ObjectStore
from shared.telemetry import FRAGMENTS, STAGE_SECONDS
from shared.worker import Worker

RETRY_S = 0.5

log = structlog.get_logger()


class FragmentPublisher:
    def __init__(
        self, device: GeneratingDevice, bus: Bus, store: ObjectStore, worker: Worker
    ) -> None:
        self._device = device
        self._bus = bus
        self._store = store
        self._worker = worker
        self._conditions: dict[str, ObjectRef] = {}

    async def publish(self, task: GenerateFragment, generated: Generated) -> None:
        """Store and report the fragment; goes on until the store takes it, or says why not."""
        STAGE_SECONDS.labels(stage="rollout").observe(generated.seconds)
        while True:
            try:
                await self._publish(task, generated)
                return
            except Unavailable as error:
                log.warning("store_unavailable", slot=str(task.fragment.slot), error=str(error))
                await asyncio.sleep(RETRY_S)
            except DigenRLError as error:
                await self.fail(task, error)
                return

    async def _publish(self, task: GenerateFragment, generated: Generated) -> None:
        folder = batch_folder(self._bus.run, task.fragment.batch)
        trajectory, media, conditions = await asyncio.gather(
            self._store.put(folder, generated.trajectory, suffix=".safetensors"),
            self._store.put(folder, generated.media, suffix=".media.safetensors"),
            self._stored_conditions(task.prompt.text),
        )
        event = FragmentGenerated(
            fragment=task.fragment,
            policy=task.policy,
            prompt=task.prompt,
            stored=Trajectories(
                trajectory=trajectory,
                conditions=conditions,
                media=media,
                weights_digest=generated.weights_digest,
            ),
            worker=self._worker.address,
            seconds=generated.seconds,
        )
        first = await self._bus.publish(event)
        self._worker.num_done += first
        FRAGMENTS.labels(stage="rollout", outcome="done" if first else "duplicate").inc()

    async def _stored_conditions(self, prompt: str) -> ObjectRef:
        """Once per prompt; the fragment was generated with them, so they are at hand."""
        if prompt not in self._conditions:
            packed = await self._device.conditions(prompt)
            folder = conditions_folder(self._bus.run)
            self._conditions[prompt] = await self._store.put(folder, packed, suffix=".safetensors")
        return self._conditions[prompt]

    async def release(
        self, task: GenerateFragment, reason: Literal["stale", "returned", "draining"]
    ) -> None:
        """Give a fragment back that was not generated."""
        log.info("fragment_released", slot=str(task.fragment.slot), reason=reason)
        FRAGMENTS.labels(stage="rollout", outcome="released").inc()
        await self._bus.publish(
            FragmentReleased(slot=task.fragment.slot, worker=self._worker.address, reason=reason)
        )

    async def fail(self, task: GenerateFragment, error: DigenRLError) -> None:
        stage: Literal["delivery", "rollout"] = "rollout"
        if isinstance(error, SlotPoisoned):
            stage = "delivery"
        log.error("fragment_failed", stage=stage, slot=str(task.fragment.slot), error=str(error))
        FRAGMENTS.labels(stage="rollout", outcome="failed").inc()
        await self._bus.publish(
            FragmentFailed(slot=task.fragment.slot, stage=stage, reason=str(error)[:4000])
        )
