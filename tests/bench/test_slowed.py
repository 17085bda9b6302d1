"""A device that takes longer than it needs to says that it took that long."""

import asyncio
import time

import pytest

from bench.slowed import SlowedDevice
from shared.devices.protocols import GroupData, GroupGradient, Staged
from tests import examples
from tests.rollout.worker import FakeDevice

STEP_S = 0.25
"""That the fake device says it took for a fragment, though it takes none."""
GROUP = GroupData(trajectories=(b"0",), conditions=b"", advantages=(1.0,))


class Slow(FakeDevice):
    async def gradient(self, group: GroupData, trained: Staged | None = None) -> GroupGradient:
        await asyncio.sleep(0.05)
        return await super().gradient(group, trained)


@pytest.fixture
def device() -> Slow:
    made = Slow(digest=examples.digest(0))
    made.free.set()
    return made


async def test_a_fragment_takes_as_many_times_as_long(device: Slow) -> None:
    work = await SlowedDevice(device, 1.5).begin(examples.task())
    began = time.monotonic()
    await work.advance()
    assert time.monotonic() - began >= 0.5 * STEP_S
    assert work.done
    assert work.seconds == 1.5 * STEP_S
    assert (await work.finish()).seconds == 1.5 * STEP_S


async def test_a_gradient_takes_as_many_times_as_long(device: Slow) -> None:
    began = time.monotonic()
    part = await SlowedDevice(device, 3.0).gradient(GROUP)
    assert time.monotonic() - began >= 3 * 0.05
    assert part == GroupGradient(gradient=b"a gradient", tally={"num_rows": 4.0})
