"""Rollout and reward workers of the simulated cluster."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.scheduler.sim.broker import Broker
from services.scheduler.sim.history import History
from services.scheduler.sim.timing import Timing
from services.scheduler.sim.world import World
from shared.messages import subjects
from shared.messages.contracts import (
    FragmentGenerated,
    FragmentReleased,
    FragmentScored,
    GenerateFragment,
    Message,
    ObjectRef,
    PolicyPublished,
    Trajectories,
)

REF = ObjectRef(key="sim/object", sha256="0" * 64, size=1)


def generation_result(task: GenerateFragment, worker: str, seconds: float) -> FragmentGenerated:
    """Return a device's report of a fragment that it has generated in this time."""
    digest = task.policy.weights_digest
    stored = Trajectories(trajectory=REF, conditions=REF, media=REF, weights_digest=digest)
    return FragmentGenerated(
        fragment=task.fragment, policy=task.policy, prompt=task.prompt, stored=stored,
        worker=worker, seconds=seconds,
    )  # fmt: skip


@dataclass(slots=True)
class SimRollout:
    """One device that generates the fragments given to it, one after the other."""

    world: World
    broker: Broker
    history: History
    timing: Timing
    name: str
    kind: str
    address: str
    newest: int = -1
    """Newest version that is published."""
    version: int = -1
    """Version that is loaded."""
    _tasks: deque[GenerateFragment] = field(default_factory=deque)
    _is_busy: bool = False

    def start(self) -> None:
        self.broker.subscribe(subjects.EVT, self._published, kinds=(PolicyPublished,))
        self.broker.subscribe(
            subjects.TASK, self._received, kinds=(GenerateFragment,), address=self.address
        )

    def _published(self, message: Message) -> None:
        assert isinstance(message, PolicyPublished)
        self.newest = max(self.newest, message.policy.version)

    def _received(self, message: Message) -> None:
        assert isinstance(message, GenerateFragment)
        self._tasks.append(message)
        self._next()

    def _next(self) -> None:
        while not self._is_busy and self._tasks:
            task = self._tasks.popleft()
            if self.newest > task.policy.version:
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
            self.broker.publish(generation_result(task, self.address, seconds))
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
