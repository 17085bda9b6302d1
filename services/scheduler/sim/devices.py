"""Rollout and reward workers of the simulated cluster."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.scheduler.sim.broker import Broker
from services.scheduler.sim.history import History
from services.scheduler.sim.sites import SimDevice
from services.scheduler.sim.timing import Timing
from services.scheduler.sim.world import World
from shared.messages import subjects
from shared.messages.contracts import (
    FragmentGenerated,
    FragmentReleased,
    FragmentScored,
    GenerateFragment,
    Message,
    Policy,
    PolicyPublished,
)


@dataclass(slots=True, kw_only=True)
class SimRollout(SimDevice):
    """One device that generates the fragments given to it, one after the other."""

    version: int = -1
    """Version that is loaded."""
    _is_busy: bool = False

    def start(self) -> None:
        self.broker.subscribe(subjects.EVT, self._published, kinds=(PolicyPublished,))
        self.broker.subscribe(
            subjects.TASK, self._received, kinds=(GenerateFragment,), address=self.address
        )

    def _published(self, message: Message) -> None:
        assert isinstance(message, PolicyPublished)
        self.newest = max(self.newest, message.policy.version)
        self._fetch(message.policy)

    def _fetch(self, policy: Policy) -> None:
        if self.site is not None:
            size = self.timing.weights_bytes
            self.site.fetch_weights(policy.version, size, self.address, self._next)

    def _received(self, message: Message) -> None:
        assert isinstance(message, GenerateFragment)
        self._tasks.append(message)
        self._fetch(message.policy)
        self._next()

    def _next(self) -> None:
        while not self._is_busy and not self._is_full and self._tasks:
            policy = self._tasks[0].policy
            if self.site is not None and self.site.version < policy.version >= self.newest:
                return  # until its weights are here
            task = self._tasks.popleft()
            if self.newest > policy.version:
                self.broker.publish(FragmentReleased(
                    slot=task.fragment.slot, worker=self.address, reason="stale"
                ))  # fmt: skip
            else:
                self._generate(task)

    def _generate(self, task: GenerateFragment) -> None:
        load = self.timing.adopt if self.version != task.policy.version else 0.0
        self._is_busy, self.version = True, task.policy.version
        seconds = self.timing.fragment(self.kind, task.fragment.num_samples)
        seconds = self.history.drawn(self.name, seconds)
        self.history.works(self.address, "generate", load, seconds)

        def done() -> None:
            self._is_busy = False
            self._store(task, seconds)
            self._next()

        self.world.after(load + seconds, done)


@dataclass(slots=True)
class SimReward:
    """A scorer of fragments, one after the other."""

    world: World
    broker: Broker
    history: History
    timing: Timing
    score: Callable[[FragmentGenerated], tuple[float, ...]]
    _queue: deque[FragmentGenerated] = field(default_factory=deque)
    _is_busy: bool = False

    def start(self) -> None:
        self.broker.subscribe(subjects.TRAJ, self._received, kinds=(FragmentGenerated,))

    def _received(self, message: Message) -> None:
        assert isinstance(message, FragmentGenerated)
        self._queue.append(message)
        self._next()

    def _next(self) -> None:
        if self._is_busy or not self._queue:
            return
        event, self._is_busy = self._queue.popleft(), True
        seconds = self.history.drawn("reward", self.timing.score(event.fragment.num_samples))

        def done() -> None:
            self._is_busy = False
            self.broker.publish(self._result(event))
            self._next()

        self.world.after(seconds, done)

    def _result(self, event: FragmentGenerated) -> Message:
        return FragmentScored(
            fragment=event.fragment, policy=event.policy, stored=event.stored,
            rewards=self.score(event), parts={}, generated_by=event.worker, worker="reward",
            seconds=0.0,
        )  # fmt: skip
