"""Stores a generated fragment, and then publishes the message that names it.

A rollout worker and a trainer's device that is lent to generation do it alike.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import structlog

from shared.bus.traces import about, did, span
from shared.devices.conditions import EncodedConditions
from shared.devices.protocols import GeneratedFragment, GeneratingDevice
from shared.errors import DigenRLError, FaultyConditions, OutOfMemory
from shared.limits import MAX_STORED_CONDITIONS
from shared.messages.contracts import (
    FragmentFailed,
    FragmentGenerated,
    FragmentReleased,
    GenerateFragment,
    ObjectRef,
    Prompt,
    Trajectories,
)
from shared.messages.workers import MemoryShortage
from shared.process.worker import WorkerContext, patiently
from shared.run.conditions import StoredConditions
from shared.run.layout import batch_folder, conditions_folder
from shared.run.previews import PREVIEW_BYTES, PreviewRule, preview_key
from shared.run.sources import SourceImages
from shared.store.media import pack
from shared.store.previews import pack_previews
from shared.telemetry import FRAGMENTS, STAGE_SECONDS

log = structlog.get_logger()


class FragmentPublisher:
    def __init__(
        self,
        device: GeneratingDevice,
        context: WorkerContext,
        *,
        encoded: EncodedConditions | None = None,
        lossless: bool = False,
        keep: Callable[[ObjectRef, bytes], None] | None = None,
        previews: PreviewRule | None = None,
    ) -> None:
        """``encoded``: source of conditions, if the device does not encode; ``lossless``: codec of
        media, run concurrently with the device; ``keep``: receives each stored trajectory;
        ``previews``: which samples have stored thumbnails."""
        self._previews = previews or PreviewRule()
        self._lossless = lossless
        self._device = device
        self._bus = context.bus
        self._store = context.store
        self._worker = context.worker
        self._encoded = encoded
        self._keep = keep
        self._sources = SourceImages(context.store, context.bus)
        self._conditions: dict[tuple[str, str, int], asyncio.Task[ObjectRef]] = {}
        """Maps (text, digest of the image, attempt) to the conditions, as they are being stored."""

    def prepare(self, task: GenerateFragment) -> None:
        """Store the conditions of a fragment that has begun, concurrently with the device, unless
        encoders have stored them."""
        if self._encoded is None:
            self._storing(task)

    async def publish(
        self,
        task: GenerateFragment,
        generated: GeneratedFragment,
        given: StoredConditions | None = None,
    ) -> None:
        """Store and report the fragment; retry until the store accepts or refuses it.

        Args:
            given: the conditions that it was begun with, if the device did not encode its
                prompt.
        """
        self._worker.note_shortage(generated.shortage)
        STAGE_SECONDS.labels(stage="rollout").observe(generated.seconds)
        did("generate", task, seconds=generated.seconds, worker=self._worker.name)
        with span("store", task):
            await self._store_and_tell(task, generated, given)

    async def _store_and_tell(
        self, task: GenerateFragment, generated: GeneratedFragment, given: StoredConditions | None
    ) -> None:
        slot, raw = str(task.fragment.slot), generated.media
        if self._lossless:
            media = await asyncio.to_thread(pack, generated.media)
            generated = replace(generated, media=media)
        try:
            await patiently(
                lambda: self._publish(task, generated, given), "store_unavailable", slot=slot
            )
        except DigenRLError as error:
            await self.fail(task, error)
            return
        await self._keep_previews(task, raw)

    async def _keep_previews(self, task: GenerateFragment, raw: bytes) -> None:
        """Store small pictures of a fragment's samples, if they are to have some: tried once, since
        nothing but the run's page misses them."""
        at = task.fragment
        if not self._previews.has(at.batch, at.group):
            return
        key = preview_key(self._bus.run, at.batch, at.group, at.first_sample, at.attempt)
        try:
            pictures = await asyncio.to_thread(pack_previews, raw, PREVIEW_BYTES)
            await self._store.write(key, pictures)
        except (DigenRLError, OSError, ValueError) as error:
            log.warning("previews_not_kept", slot=str(at.slot), error=str(error))

    async def _publish(
        self, task: GenerateFragment, generated: GeneratedFragment, given: StoredConditions | None
    ) -> None:
        folder = batch_folder(self._bus.run, task.fragment.batch)
        trajectory, media, conditions = await asyncio.gather(
            self._store.put(folder, generated.trajectory, suffix=".safetensors"),
            self._store.put(folder, generated.media, suffix=".media.safetensors"),
            asyncio.shield(self._storing(task)) if given is None else self._given(task, given),
        )
        if self._keep is not None:
            self._keep(trajectory, generated.trajectory)
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

    async def _given(self, task: GenerateFragment, given: StoredConditions) -> ObjectRef:
        """Return where the conditions are; after a failed attempt, the stored object may have been
        faulty, and these are not."""
        if task.fragment.attempt:
            folder = conditions_folder(self._bus.run)
            await self._store.put(folder, given.packed, suffix=".safetensors")
        return given.ref

    def _storing(self, task: GenerateFragment) -> asyncio.Task[ObjectRef]:
        """Store the conditions once per prompt, unless that has failed."""
        prompt, attempt = task.prompt, task.fragment.attempt
        which = (prompt.text, prompt.image.sha256 if prompt.image else "", attempt)
        storing = self._conditions.get(which)
        if storing is None or (storing.done() and (storing.cancelled() or storing.exception())):
            storing = self._conditions[which] = asyncio.create_task(
                self._store_conditions(prompt, attempt)
            )
            # Whoever publishes sees that it failed; a fragment that is given back does not ask.
            storing.add_done_callback(lambda done: done.cancelled() or done.exception())
            while len(self._conditions) > MAX_STORED_CONDITIONS:
                del self._conditions[next(iter(self._conditions))]
        return storing

    async def _store_conditions(self, prompt: Prompt, attempt: int) -> ObjectRef:
        """Store what the fragment is generated with, which is at hand; other devices that generate
        the group may have stored it. Where an attempt has failed, the stored object may be faulty.
        """
        source = await self._sources.get(prompt.image)
        packed = await self._device.conditions(prompt.text, source, prompt.negative_prompt)
        put = self._store.put if attempt else self._store.put_once
        return await put(conditions_folder(self._bus.run), packed, suffix=".safetensors")

    async def release(
        self, task: GenerateFragment, reason: Literal["stale", "returned", "draining"]
    ) -> None:
        """Give a fragment back that was not generated."""
        with about(task):
            log.info("fragment_released", slot=str(task.fragment.slot), reason=reason)
        FRAGMENTS.labels(stage="rollout", outcome="released").inc()
        await self._bus.publish(
            FragmentReleased(slot=task.fragment.slot, worker=self._worker.address, reason=reason)
        )

    async def fail(self, task: GenerateFragment, error: DigenRLError) -> None:
        if isinstance(error, FaultyConditions) and self._encoded is not None:
            await self._encoded.forget(task.prompt)
        if isinstance(error, OutOfMemory):
            self._worker.note_shortage(MemoryShortage.from_error(error, "the fragment has failed"))
        with about(task):
            log.error("fragment_failed", slot=str(task.fragment.slot), error=str(error))
        FRAGMENTS.labels(stage="rollout", outcome="failed").inc()
        await self._bus.publish(
            FragmentFailed(
                slot=task.fragment.slot,
                stage="rollout",
                reason=str(error)[:4000],
                worker=task.worker,
            )
        )
