"""Rollout and reward workers of the simulated cluster.

They obey the same pure rules as the services: the staleness gate, refusal of superseded versions,
one policy version per trajectory, result before acknowledgement.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.scheduler.sim.broker import Broker
from services.scheduler.sim.history import History
from services.scheduler.sim.timing import Timing
from services.scheduler.sim.world import Process
from shared.errors import AdmissionError
from shared.messages import subjects
from shared.messages.contracts import (
    FragmentFailed,
    FragmentGenerated,
    FragmentReleased,
    FragmentScored,
    GenerateFragment,
    Message,
    ObjectRef,
    Policy,
    PolicyPublished,
    Trajectories,
)
from shared.messages.staleness import check_task

REF = ObjectRef(key="sim/object", sha256="0" * 64, size=1)


def result_of(
    task: GenerateFragment, digest: str, worker: str, seconds: float, generation: int
) -> FragmentGenerated:
    trajectory = ObjectRef(key=f"sim/{generation}", sha256=REF.sha256, size=1)
    stored = Trajectories(trajectory=trajectory, conditions=REF, media=REF, weights_digest=digest)
    return FragmentGenerated(
        fragment=task.fragment, policy=task.policy, prompt=task.prompt, stored=stored,
        worker=worker, seconds=seconds,
    )  # fmt: skip


@dataclass(slots=True)
class SimRollout:
    """One device that generates the fragments given to it, one after the other."""

    process: Process
    broker: Broker
    history: History
    timing: Timing
    kind: str
    address: str
    max_staleness: int
    hangs: bool = False
    """A fault: it reports, and finishes nothing any more."""
    newest: int = -1
    """Version that it has heard of."""
    version: int = -1
    weights: str = ""
    """Digest of what it has really loaded."""
    _tasks: deque[GenerateFragment] = field(default_factory=deque)
    _current: GenerateFragment | None = None

    def start(self) -> None:
        self.broker.subscribe(
            self.process, subjects.EVT, self._heard, _is_publication, kinds=(PolicyPublished,)
        )
        self.broker.subscribe(
            self.process, subjects.TASK, self._received,
            lambda m: isinstance(m, GenerateFragment) and m.worker == self.address,
            address=self.address,
        )  # fmt: skip

    @property
    def idles(self) -> bool:
        return self._current is None and not self._tasks

    def _heard(self, message: Message) -> None:
        assert isinstance(message, PolicyPublished)
        self.newest = max(self.newest, message.policy.version)

    def _received(self, message: Message) -> None:
        assert isinstance(message, GenerateFragment)
        self._tasks.append(message)
        self._next()

    def _next(self) -> None:
        while self._current is None and self._tasks:
            refusal = self._begin_fragment()
            if refusal is not None:
                self._current = None
                self.broker.send(self.process, refusal)

    def _begin_fragment(self) -> Message | None:
        """Gives the reason, if it may not."""
        self._current = task = self._tasks.popleft()
        refusal = self._refusal(task)
        if refusal is None:
            self._generate(task)
        return refusal

    def _refusal(self, task: GenerateFragment) -> Message | None:
        if self.newest > task.policy.version:
            return FragmentReleased(slot=task.fragment.slot, worker=self.address, reason="stale")
        try:
            check_task(task, max_staleness=self.max_staleness)
        except AdmissionError as error:
            return FragmentFailed(
                slot=task.fragment.slot, stage="rollout", reason=str(error), worker=self.address
            )
        return None

    def _generate(self, task: GenerateFragment) -> None:
        load = self._adopt(task.policy)
        weights = self.weights
        seconds = self.timing.fragment(self.kind, task.fragment.num_samples)
        seconds = self.history.drawn(self.process.name, seconds)
        generation = self.history.begins()
        self.history.works(self.address, "generate", load, seconds)

        def done() -> None:
            if self.hangs:
                return
            self._current = None
            result = result_of(task, weights, self.address, seconds, generation)
            self.broker.send(self.process, result)
            self._next()

        self.process.after(load + seconds, done)

    def _adopt(self, policy: Policy) -> float:
        """Load a version; gives the seconds that it takes."""
        before, self.version = self.version, policy.version
        self.weights = policy.weights_digest
        return self.timing.adopt if self.version != before else 0.0


@dataclass(slots=True)
class SimReward:
    """A pool of scorers that share a queue; a fragment whose scorer dies is delivered again."""

    process: Process
    broker: Broker
    history: History
    timing: Timing
    score: Callable[[FragmentGenerated], tuple[float, ...]]
    workers: int = 1
    _queue: deque[FragmentGenerated] = field(default_factory=deque)
    _busy: int = 0

    def start(self) -> None:
        self.broker.consume(self.process, subjects.TRAJ, self._received)

    def _received(self, message: Message) -> None:
        assert isinstance(message, FragmentGenerated)
        self._queue.append(message)
        self._next()

    def _next(self) -> None:
        while self._queue and self._busy < self.workers:
            event = self._queue.popleft()
            if not self.broker.is_acked(subjects.TRAJ, event):
                self._begin(event)

    def _begin(self, event: FragmentGenerated) -> None:
        self._busy += 1
        seconds = self.history.drawn(
            self.process.name, self.timing.score(event.fragment.num_samples)
        )
        self.process.after(seconds, lambda: self._scored(event))

    def _scored(self, event: FragmentGenerated) -> None:
        """The result first, then the acknowledgement: one may die in between."""
        self._busy -= 1
        self.broker.send(self.process, self._result(event))
        self.broker.ack(subjects.TRAJ, event)
        self._next()

    def _result(self, event: FragmentGenerated) -> Message:
        return FragmentScored(
            fragment=event.fragment, policy=event.policy, stored=event.stored,
            rewards=self.score(event), parts={}, generated_by=event.worker, worker="reward",
            seconds=0.0,
        )  # fmt: skip


def _is_publication(message: Message) -> bool:
    return isinstance(message, PolicyPublished)
