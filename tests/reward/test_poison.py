"""What no rollout worker sends ends no reward worker: its fragment fails, with the reason."""

import asyncio
import contextlib

import pytest

from services.reward.scoring import MediaSize
from services.scheduler.shell.dead_letters import failure_of, letter_of
from shared.bus.bus import Bus
from shared.messages import subjects
from shared.messages.codec import encode
from shared.messages.contracts import FragmentFailed, FragmentScored
from shared.store import ObjectStore
from tests import examples
from tests.reward.on_bus import Works, app_of, first, generated

pytestmark = pytest.mark.broker


async def test_poison_fails_its_fragment_and_the_next_one_is_scored(
    bus: Bus, folder_store: ObjectStore
) -> None:
    other = encode(examples.task())
    await bus.jetstream.publish("dg.test.traj.rollout-0.0.7.0.0", other)
    for group, shape in enumerate([(), (2000, 1, 8, 8), (2, 1, 8, 8)]):
        await bus.publish(examples.task(group=group))
        await bus.publish(await generated(folder_store, group, shape))
    app = app_of(bus, folder_store, Works(), size=MediaSize(height=8, width=8))
    running = asyncio.create_task(app.run())
    [scored] = await first(bus, subjects.REW, 1)
    assert isinstance(scored, FragmentScored) and scored.fragment.group == 2
    failed = [e for e in await first(bus, subjects.EVT, 2) if isinstance(e, FragmentFailed)]
    assert sorted((e.slot.group, e.stage) for e in failed) == [(0, "reward"), (1, "reward")]
    assert "do not fit 2 samples" in failed[1].reason
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
