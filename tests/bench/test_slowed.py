"""A device that takes longer than it needs to says that it took that long."""

import time

from bench.slowed import SlowedDevice
from tests import examples
from tests.rollout.worker import FakeDevice

STEP_S = 0.25
"""That the fake device says it took for a fragment, though it takes none."""


async def test_a_fragment_takes_as_many_times_as_long() -> None:
    device = FakeDevice(digest=examples.digest(0))
    work = await SlowedDevice(device, 1.5).begin(examples.task())
    began = time.monotonic()
    await work.advance()
    assert time.monotonic() - began >= 0.5 * STEP_S
    assert work.done
    assert work.seconds == 1.5 * STEP_S
    assert (await work.finish()).seconds == 1.5 * STEP_S
