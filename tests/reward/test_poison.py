"""What no rollout worker sends ends no reward worker: its fragment fails, with the reason."""

import asyncio
import contextlib

import numpy as np
import pytest
import safetensors.numpy

from services.reward.app import RewardApp
from services.reward.scorer import WeightedScorer
from services.reward.scoring import MediaSize
from services.scheduler.shell.dead_letters import failure_of, letter_of
from shared.bus.bus import Bus
from shared.messages import subjects
from shared.messages.codec import encode
from shared.messages.contracts import FragmentFailed, FragmentScored, Message
from shared.process.worker import Worker, WorkerContext
from shared.store import ObjectStore
from tests import examples

pytestmark = pytest.mark.broker


class Works:
    def score(self, images: object, metadata: object, /) -> list[float]:
        return [0.5, 0.5]


async def first(bus: Bus, stream: subjects.Stream, count: int) -> list[Message]:
    found: list[Message] = []
    async with asyncio.timeout(20), contextlib.aclosing(bus.follow(stream)) as stored:
        async for received in stored:
            assert received.message is not None
            found.append(received.message)
            if len(found) == count:
                break
    return found


async def test_poison_fails_its_fragment_and_the_next_one_is_scored(
    nats_url: str, folder_store: ObjectStore
) -> None:
    async with Bus.connect(nats_url, run="test", name="test") as bus:
        await bus.ensure_streams()

        async def generated(group: int, *shape: int) -> None:
            images = safetensors.numpy.save({"images": np.zeros(shape, np.uint8)})
            media = await folder_store.put("test", images, suffix=".safetensors")
            task = examples.task(group=group)
            await bus.publish(task)
            event = examples.generated(task)
            stored = event.stored.model_copy(update={"media": media})
            await bus.publish(event.model_copy(update={"stored": stored}))

        other = encode(examples.task())
        await bus.jetstream.publish("dg.test.traj.rollout-0.0.7.0.0", other)
        await generated(0)
        await generated(1, 2000, 1, 8, 8)
        await generated(2, 2, 1, 8, 8)
        worker = Worker("reward", "reward", "waiting_for_rollout")
        scorers = [WeightedScorer("proxy", 1.0, Works())]
        size = MediaSize(height=8, width=8)
        running = asyncio.create_task(
            RewardApp(scorers, WorkerContext(bus, folder_store, worker), size=size).run()
        )
        [scored] = await first(bus, subjects.REW, 1)
        assert isinstance(scored, FragmentScored) and scored.fragment.group == 2
        failed = [e for e in await first(bus, subjects.EVT, 2) if isinstance(e, FragmentFailed)]
        assert sorted((e.slot.group, e.stage) for e in failed) == [(0, "reward"), (1, "reward")]
        assert "no images or videos of 2 samples" in failed[1].reason
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

        for subject in ("DG_X.abc", "DG_TRAJ.abc", "DG_TRAJ.0", f"DG_TRAJ.{10**30}", "DG_TRAJ.²"):
            await bus.jetstream.publish(f"dg.test.quarantine.{subject}", b"")
        deaths = []
        async with asyncio.timeout(20), contextlib.aclosing(bus.follow(subjects.DLQ)) as letters:
            async for letter in letters:
                found = await letter_of(bus, letter)
                deaths.append(None if found is None else failure_of(found))
                if len(deaths) == 6:
                    break
        [died] = [death for death in deaths if death is not None]
        assert isinstance(died, FragmentFailed)
        assert (died.slot.group, died.stage) == (7, "delivery")
        assert "which is not its subject" in died.reason
