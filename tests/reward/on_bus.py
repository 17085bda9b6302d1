"""A reward worker on a real broker, and what it is sent."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import safetensors.numpy

from services.reward.app import RewardApp
from services.reward.scorer import Scorer, WeightedScorer
from shared.bus.bus import Bus
from shared.messages import subjects
from shared.messages.contracts import FragmentGenerated, Message
from shared.process.worker import Worker, WorkerContext
from shared.store import ObjectStore
from tests import examples


class Works:
    def score(self, images: object, metadata: object, /) -> list[float]:
        return [0.5, 0.5]


async def generated(
    store: ObjectStore, group: int = 0, shape: tuple[int, ...] = (2, 1, 8, 8)
) -> FragmentGenerated:
    """Store black images, and return what a device says of them."""
    images = safetensors.numpy.save({"images": np.zeros(shape, np.uint8)})
    media = await store.put("test", images, suffix=".safetensors")
    event = examples.generated(examples.task(group=group))
    return event.model_copy(update={"stored": event.stored.model_copy(update={"media": media})})


def context_alone() -> WorkerContext:
    """Return a context without services, for an app that only computes."""
    nothing: Any = SimpleNamespace(traffic=None)
    return WorkerContext(nothing, nothing, nothing)


def app_of(
    bus: Bus | None, store: ObjectStore, scorer: Scorer, worker: str = "reward-0", **given: Any
) -> RewardApp:
    context = WorkerContext(bus, store, Worker("reward", worker, "waiting_for_rollout"))  # type: ignore[arg-type]
    return RewardApp([WeightedScorer("proxy", 1.0, scorer)], context, **given)


async def first(bus: Bus, stream: subjects.Stream, count: int) -> list[Message]:
    found: list[Message] = []
    async with asyncio.timeout(30), contextlib.aclosing(bus.follow(stream)) as stored:
        async for received in stored:
            assert received.message is not None
            found.append(received.message)
            if len(found) == count:
                break
    return found
