"""A device gets as much work as it has shown that it does, whatever it says of itself."""

import heapq
from dataclasses import replace

from services.scheduler.core.inputs import MachineInput, Tick, WorkerJoined
from services.scheduler.core.machine import step
from services.scheduler.core.state import State
from shared.messages.contracts import FragmentScored, GenerateFragment
from tests import examples

SECONDS = 10.0
"""Of a fragment, on any device."""


class Devices:
    """Generates in virtual time: each device so many fragments at once, whatever it says."""

    def __init__(self, says: dict[str, int], does: dict[str, int], groups: int = 20) -> None:
        self.plan = examples.plan(num_groups=groups)
        self.state, self.does = State(), does
        self.queued: dict[str, list[GenerateFragment]] = {name: [] for name in says}
        self.most = dict.fromkeys(says, 0)
        self.done = dict.fromkeys(says, 0)
        self.now = 0.0
        self._begun = 0
        self._ends: list[tuple[float, int, str, GenerateFragment]] = []
        self._at_work = dict.fromkeys(says, 0)
        for name, slots in says.items():
            self.handle(WorkerJoined(name, name, "rollout", concurrency=slots))
        self.handle(examples.published(0))

    def handle(self, event: MachineInput) -> None:
        self.state, commands = step(self.plan, self.state, event, self.now)
        for task in commands:
            if isinstance(task, GenerateFragment):
                self.queued[task.worker].append(task)
        for name, queue in self.queued.items():
            self.most[name] = max(self.most[name], len(queue) + self._at_work[name])
            while queue and self._at_work[name] < self.does[name]:
                self._at_work[name] += 1
                task = queue.pop(0)
                self._begun += 1
                heapq.heappush(self._ends, (self.now + SECONDS, self._begun, name, task))

    def run(self) -> float:
        """Return the seconds until nothing is under way."""
        while self._ends:
            self.now, _, name, task = heapq.heappop(self._ends)
            self._at_work[name] -= 1
            self.done[name] += 1
            seconds = {"seconds": SECONDS}
            self.handle(examples.generated(task).model_copy(update=seconds))
            scored: FragmentScored = examples.scored(task)
            self.handle(scored)
        return self.now


def test_a_device_that_says_4096_and_does_one_gets_hardly_more_than_its_share() -> None:
    devices = Devices({"liar": 4096, "a": 1, "b": 1}, {"liar": 1, "a": 1, "b": 1})
    assert devices.most["liar"] <= devices.plan.queue_depth
    devices.run()
    assert sum(devices.done.values()) == 40
    assert devices.most["liar"] <= 2 * devices.plan.queue_depth
    assert devices.done["liar"] <= 40 // 3 + devices.plan.queue_depth + 1


def test_a_device_that_says_4096_and_does_nothing_holds_two_fragments() -> None:
    devices = Devices({"liar": 4096, "a": 1}, {"liar": 0, "a": 1})
    devices.run()
    assert devices.most["liar"] == devices.plan.queue_depth
    assert devices.done["a"] == 40 - devices.plan.queue_depth
    for _ in range(3000):  # and loses them at the deadline
        devices.now += 1
        devices.handle(Tick())
    devices.run()
    assert devices.done["a"] == 40


def test_a_device_that_generates_eight_at_a_time_comes_to_have_eight() -> None:
    devices = Devices({"wide": 8, "a": 1}, {"wide": 8, "a": 1}, groups=60)
    seconds = devices.run()
    assert devices.state.workers["wide"].concurrency == 8
    assert devices.done["wide"] > 4 * devices.done["a"]
    assert seconds < 120 / 9 * SECONDS * 1.5


def test_one_slot_is_what_it_was() -> None:
    """Every rollout device of DigenRL says one: nothing of it is learned or changed."""
    devices = Devices({"a": 1, "b": 1}, {"a": 1, "b": 1})
    devices.run()
    for worker in devices.state.workers.values():
        assert worker == replace(worker, concurrency=1, shown=None)
