"""The reward worker: scores generated fragments, and reports numbers or the reason why not."""

import asyncio
import math
import time

import safetensors.numpy
import structlog
from safetensors import SafetensorError

from services.reward.scorer import WeightedScorer, checked_scores, told_of
from shared import subjects
from shared.bus import Bus
from shared.contracts import FragmentFailed, FragmentGenerated, FragmentScored
from shared.errors import ContractError, DigenRLError, SlotPoisoned, Unavailable
from shared.store import ObjectStore
from shared.telemetry import FRAGMENTS, STAGE_SECONDS
from shared.worker import Worker

IN_HAND = 2
"""While one fragment is scored, the media of the next is fetched."""

log = structlog.get_logger()


class RewardApp:
    def __init__(
        self, scorers: list[WeightedScorer], bus: Bus, store: ObjectStore, worker: Worker
    ) -> None:
        self._scorers = scorers
        self._bus = bus
        self._store = store
        self._worker = worker
        self._device = asyncio.Lock()

    async def run(self) -> None:
        await self._bus.wait_for_streams()
        self._worker.activity = self._worker.idle
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._worker.report(self._bus))
            for _ in range(IN_HAND):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        queue = self._bus.queue(subjects.TRAJ, "reward")
        while True:
            async with await queue.next() as event:
                assert isinstance(event, FragmentGenerated)
                try:
                    await self._score(event)
                except Unavailable:
                    raise
                except DigenRLError as error:
                    await self._fail(event, error)

    async def _score(self, event: FragmentGenerated) -> None:
        media = await self._store.get(event.stored.media)
        async with self._device:
            began = time.monotonic()
            with self._worker.doing("scoring"):
                parts = await asyncio.to_thread(self._parts, media, event)
            seconds = time.monotonic() - began
        STAGE_SECONDS.labels(stage="reward").observe(seconds)
        scored = FragmentScored(
            fragment=event.fragment,
            policy=event.policy,
            stored=event.stored,
            rewards=weighted_sum(parts, self._scorers),
            parts=parts,
            generated_by=event.worker,
            worker=self._worker.address,
            seconds=seconds,
        )
        first = await self._bus.publish(scored)
        self._worker.num_done += first
        FRAGMENTS.labels(stage="reward", outcome="done" if first else "duplicate").inc()

    def _parts(self, media: bytes, event: FragmentGenerated) -> dict[str, tuple[float, ...]]:
        try:
            images = safetensors.numpy.load(media)["images"]
        except (SafetensorError, KeyError) as error:
            raise ContractError(f"the media of {event.fragment.slot} hold no images") from error
        metadata = [told_of(event.prompt)] * len(images)
        return {s.name: checked_scores(s, images, metadata) for s in self._scorers}

    async def _fail(self, event: FragmentGenerated, error: DigenRLError) -> None:
        log.error("fragment_failed", slot=str(event.fragment.slot), error=str(error))
        FRAGMENTS.labels(stage="reward", outcome="failed").inc()
        await self._bus.publish(
            FragmentFailed(
                slot=event.fragment.slot,
                stage="delivery" if isinstance(error, SlotPoisoned) else "reward",
                reason=str(error)[:4000],
            )
        )


def weighted_sum(
    parts: dict[str, tuple[float, ...]], scorers: list[WeightedScorer]
) -> tuple[float, ...]:
    """One reward per sample: the sum of its scores, each times its scorer's weight."""
    columns = [[scorer.weight * score for score in parts[scorer.name]] for scorer in scorers]
    return tuple(math.fsum(scores) for scores in zip(*columns, strict=True))
