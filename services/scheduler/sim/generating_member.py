"""A fluid device of the simulated cluster as it generates: its fragments and its weights."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from services.scheduler.sim.broker import Broker
from services.scheduler.sim.commits import Commit, Commits
from services.scheduler.sim.devices import result_of
from services.scheduler.sim.history import History
from services.scheduler.sim.timing import Timing
from services.scheduler.sim.world import Process
from shared.messages.contracts import (
    FragmentReleased,
    GenerateFragment,
    Message,
    Policy,
    PolicyPublished,
)
from shared.messages.fluid import (
    TrainPiece,
)
from shared.messages.workers import Holds


@dataclass(slots=True, kw_only=True)
class GeneratingMember(ABC):
    process: Process
    broker: Broker
    history: History
    timing: Timing
    kind: str
    address: str
    commits: Commits
    report: Callable[[], None] = lambda: None
    """Tells the scheduler at once what it holds."""
    hangs: bool = False
    """A fault: it reports, and finishes nothing any more."""
    newest: int = -1
    """Version that it has heard of."""
    policy: Policy | None = None
    """Version whose weights are in memory."""
    checksum: str = ""
    holds: Holds | None = None
    made: tuple[int, int, Policy] | None = None
    """Batch and attempt of its own step, and what that made."""
    one_step: bool = False
    """Whether it has a second set of weights: its steps are taken beside what it does, and it goes
    on with the version before where that has begun a group."""
    before: Policy | None = None
    """Version in the second set, which still generates."""
    ahead: tuple[Policy, str] | None = None
    """What its step has made beside: it is taken between two pieces of work."""
    update: int = 0
    """Updates of the batch that it has taken, where they have made no version yet."""
    inner: str = ""
    """Digest of the weights that they have made."""
    beside: float = 0.0
    """Seconds of the device that a step or a copy beside its work has taken: what it does next
    takes as much longer."""
    _busy: bool = False
    _tasks: deque[GenerateFragment] = field(default_factory=deque)
    _pieces: deque[TrainPiece] = field(default_factory=deque)

    @property
    def idles(self) -> bool:
        return not self._busy and not self._tasks and not self._pieces

    @abstractmethod
    def _begin_piece(self, command: TrainPiece) -> None:
        """Train a piece, unless it is not of the sum that is here."""

    # --- generating ---

    def _given(self, message: Message) -> None:
        assert isinstance(message, GenerateFragment)
        self._tasks.append(message)
        self._next()

    def _next(self) -> None:
        """Fragments of the batch before pieces, and those of the next one after them; nothing while
        weights change."""
        while not self._busy:
            if self.ahead is not None:
                self._take()
            elif (task := self._next_task()) is not None:
                self._tasks.remove(task)
                self._begin_fragment(task)
            elif self._pieces:
                self._begin_piece(self._pieces.popleft())
            else:
                return

    def _next_task(self) -> GenerateFragment | None:
        if not self._tasks:
            return None
        if not self.one_step or self.policy is None:
            return next((task for task in self._tasks if not self._has_lost(task)), None)
        here = self.policy.version
        now = next((task for task in self._tasks if task.fragment.batch <= here), None)
        return now or (None if self._pieces else self._tasks[0])

    def _has_lost(self, task: GenerateFragment) -> bool:
        """Whether the fragment's version is what the updates so far went from."""
        return bool(self.update) and task.policy == self.policy

    def _take(self) -> None:
        """Use what the step has made; the version before lies beside it."""
        assert self.ahead is not None
        self.before, (self.policy, self.checksum), self.ahead = self.policy, self.ahead, None

    @property
    def state(self) -> str:
        """Checksum of what its next step goes from."""
        if self.update:
            return self.inner[:32]
        return self.checksum if self.ahead is None else self.ahead[1]

    @property
    def last(self) -> Policy | None:
        """The newest version that it has, in use or not yet."""
        return self.policy if self.ahead is None else self.ahead[0]

    def _begin_fragment(self, task: GenerateFragment) -> None:
        if task.policy == self.before and task.fragment.batch <= task.policy.version + 1:
            self._generate(task)
        elif self.newest > task.policy.version:
            self._release(task, "stale")
        elif task.policy == self.policy:
            self._generate(task)
        else:
            found = self._committed(task.policy)
            if found is None:
                self._release(task, "stale")
            else:
                self._tasks.appendleft(task)
                self._load(found)

    def _generate(self, task: GenerateFragment) -> None:
        assert self.policy is not None
        weights = self._weights_for(task)
        seconds = self.history.drawn(
            self.process.name, self.timing.fragment(self.kind, task.fragment.num_samples)
        )
        generation = self.history.begins()
        self.history.works(f"{self.address}/0", "generate", 0.0, seconds)

        def done() -> None:
            self.broker.send(
                self.process, result_of(task, weights, self.address, seconds, generation)
            )

        self._occupy(seconds, done)

    def _weights_for(self, task: GenerateFragment) -> str:
        """Digest of the weights that a fragment is generated with."""
        used = self.before if task.policy == self.before else self.policy
        assert used is not None
        is_moved = self.update and not self.one_step and used is self.policy
        return self.inner if is_moved else used.weights_digest

    def _occupy(self, seconds: float, done: Callable[[], None]) -> None:
        self._busy, taken, self.beside = True, self.beside, 0.0

        def end() -> None:
            if not self.hangs:
                self._busy = False
                done()
                self._next()

        self.process.after(seconds + taken, end)

    def _release(self, task: GenerateFragment, reason: Literal["stale", "draining"]) -> None:
        slot = task.fragment.slot
        self.broker.send(
            self.process, FragmentReleased(slot=slot, worker=self.address, reason=reason)
        )

    # --- loading ---

    def _published(self, message: Message) -> None:
        assert isinstance(message, PolicyPublished)
        version = message.policy.version
        if version <= self.newest:
            return
        self.newest = version
        held = self.holds
        if held is not None and (held.version, held.checksum, held.update) == (
            version, message.checksum, 0,
        ):  # fmt: skip
            return
        found = self._committed(message.policy)
        if found is not None:
            self._let_go()
            self._load(found)

    def _committed(self, policy: Policy) -> Commit | None:
        versions = self.commits.versions
        if policy.version >= len(versions) or versions[policy.version].policy != policy:
            return None
        return versions[policy.version]

    def _load(self, commit: Commit) -> None:
        """Load weights, moments and average, as soon as it does nothing else."""
        if self._busy:
            self.process.after(0.05, lambda: self._load(commit))
            return
        if self.holds is not None and self.last == commit.policy and not self.update:
            return
        self.holds = None

        def loaded() -> None:
            self.made, self.before, self.ahead = None, None, None
            self.update, self.inner = 0, ""
            self.policy, self.checksum = commit.policy, commit.checksum or ""
            self.newest = max(self.newest, commit.policy.version)
            newest = self.commits.versions[-1]
            if newest.policy.version > commit.policy.version:
                self._load(newest)
                return
            self._hold()

        self.history.works(f"{self.address}/0", "load", self.timing.adopt_state, 0.0)
        self._occupy(self.timing.adopt_state, loaded)

    def _let_go(self) -> None:
        self.holds = None
        self.report()

    def _hold(self) -> None:
        policy, _ = self.ahead or (self.policy, self.checksum)
        assert policy is not None
        self.holds = Holds(version=policy.version, checksum=self.state, update=self.update)
        self.report()

    def _occupy_when_free(self, seconds: float, done: Callable[[], None]) -> None:
        if self._busy:
            self.process.after(0.01, lambda: self._occupy_when_free(seconds, done))
        else:
            self._occupy(seconds, done)
