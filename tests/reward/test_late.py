"""A reward worker that hangs and still reports: another one scores what it was at."""

import asyncio
import threading

import pytest

from services.reward import limits
from services.reward.app import RewardApp
from shared.bus import queue as bus_queue
from shared.bus.bus import Bus
from shared.limits import FIRST_DEADLINE_S, MIN_DEADLINE_S
from shared.messages import subjects
from shared.messages.contracts import FragmentScored
from shared.store import ObjectStore
from tests import examples
from tests.reward.on_bus import Works, app_of, context_alone, first, generated


class Stuck:
    """Scores nothing until it is let go."""

    def __init__(self) -> None:
        self.began, self.let_go = threading.Event(), threading.Event()

    def score(self, images: object, metadata: object, /) -> list[float]:
        self.began.set()
        self.let_go.wait()
        return [0.0, 0.0]


@pytest.mark.broker
@pytest.mark.slow
async def test_what_a_scorer_hangs_at_is_scored_by_another_and_the_first_result_counts(
    bus: Bus, folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_queue, "ACK_WAIT_S", 1.0)
    stuck = Stuck()
    await bus.publish(examples.task())
    await bus.publish(await generated(folder_store))

    def start(scorer: Stuck | Works, name: str) -> asyncio.Task[None]:
        app = app_of(bus, folder_store, scorer, worker=name, deadline_s=0.5)
        return asyncio.create_task(app.run())

    stuck_one = start(stuck, "first")
    async with asyncio.timeout(30):
        await asyncio.to_thread(stuck.began.wait)
        second = start(Works(), "second")
        [received] = await first(bus, subjects.REW, 1)
    stuck.let_go.set()
    assert isinstance(received, FragmentScored) and received.rewards == (0.5, 0.5)
    for task in (stuck_one, second):
        task.cancel()
    await asyncio.gather(stuck_one, second, return_exceptions=True)
    found, _ = await bus.stored(subjects.REW)
    assert found[0].message == received, "the scheduler takes the first"


def test_a_scorer_may_take_ten_times_what_it_took_before() -> None:
    app = RewardApp([], context_alone())
    event = examples.generated(examples.task())
    assert app._timeout(event) == FIRST_DEADLINE_S
    app._seconds = 0.01
    assert app._timeout(event) == MIN_DEADLINE_S
    app._seconds = 60.0
    assert app._timeout(event) == 10 * 2 * 2 * 60.0


@pytest.mark.broker
async def test_a_result_that_comes_before_its_task_is_scored_and_one_without_is_passed_over(
    bus: Bus, folder_store: ObjectStore
) -> None:
    """NATS has lost both, and the device has sent its result once more."""
    for group in (1, 0):
        await bus.publish(await generated(folder_store, group))
    scoring = asyncio.create_task(app_of(bus, folder_store, Works()).run())
    await asyncio.sleep(limits.TASK_LOOKUP_INTERVAL_S / 2)
    await bus.publish(examples.task(group=0))
    [received] = await first(bus, subjects.REW, 1)
    assert isinstance(received, FragmentScored) and received.fragment.group == 0
    scoring.cancel()
    await asyncio.wait([scoring])
