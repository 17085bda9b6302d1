"""A member of the simulated cluster as it generates: its fragments, its weights and its loans.

A member that follows loans generates only while it is lent, and pieces come first. It stops after
the denoising step that it is at, and keeps the unfinished fragment for its next loan.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from services.scheduler.costs.fluid import STATE_PARTS
from services.scheduler.sim.commits import Commit
from services.scheduler.sim.sites import SimDevice
from shared.devices.loan import Loan, apply, may_generate
from shared.messages.contracts import (
    FragmentReleased,
    FragmentSlot,
    GenerateFragment,
    Message,
    Policy,
    PolicyPublished,
    SetDevice,
)
from shared.messages.fluid import TrainPiece
from shared.messages.workers import Holds


@dataclass(slots=True, kw_only=True)
class UnfinishedFragment:
    """A fragment on a device that follows loans."""

    task: GenerateFragment
    total: float
    """Seconds that it takes."""
    left: float
    """Seconds of them that are still to do."""
    since: float = 0.0
    """When the device has begun with it, or gone on."""


@dataclass(slots=True, kw_only=True)
class GeneratingMember(SimDevice):
    commits: list[Commit]
    """Commits of the run, by their versions."""
    report: Callable[[], None] = lambda: None
    """Reports to the scheduler at once what the member holds, and whether it is lent."""
    loan: Loan | None = None
    """None: it generates without loans."""
    policy: Policy | None = None
    """Version whose weights are in memory."""
    holds: Holds | None = None
    one_step: bool = False
    """Whether it has a second set of weights: steps run concurrently, and a group is finished with
    the version that began it."""
    comes_to: int = -1
    """Version that it has, or is about to have."""
    before: Policy | None = None
    """Version in the second set, which still generates."""
    ahead: Policy | None = None
    """Version that its concurrent step has made; adopted between two pieces of work."""
    update: int = 0
    """Updates of the batch that it has taken, where they have made no version yet."""
    inner: str = ""
    """Digest of the weights that they have made."""
    overhead_s: float = 0.0
    """Device seconds of concurrent steps and copies; they delay the next work."""
    gathered: Policy | None = None
    """Version of which each rank of a shard group holds the whole network."""
    generates: bool = False
    """Whether it may generate, lent or not."""
    _busy: bool = False
    _use: int = 0
    """Counts what it has begun: what it has stopped does not end."""
    _current: UnfinishedFragment | None = None
    """The fragment that it is at, if it follows loans."""
    _kept: dict[FragmentSlot, UnfinishedFragment] = field(default_factory=dict)
    _pieces: deque[TrainPiece] = field(default_factory=deque)

    @abstractmethod
    def _begin_piece(self, command: TrainPiece) -> None:
        """Train a piece."""

    # --- generating ---

    def _given(self, message: Message) -> None:
        assert isinstance(message, GenerateFragment)
        self._tasks.append(message)
        self._next()

    def _next(self) -> None:
        """Fragments of the batch first, then pieces, then fragments of the next batch; nothing
        while weights change."""
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
        if not self._tasks or self._is_full:
            return None
        if not self._may_generate:
            return next((task for task in self._tasks if self._is_stale(task)), None)
        if not self.one_step or self.policy is None:
            return next((task for task in self._tasks if not self._has_lost(task)), None)
        here = self.policy.version
        now = next((task for task in self._tasks if task.fragment.batch <= here), None)
        return now or (None if self._pieces else self._tasks[0])

    def _is_stale(self, task: GenerateFragment) -> bool:
        """Whether the fragment's version is not here any more."""
        return not self._is_of_before(task) and self.newest > task.policy.version

    def _is_of_before(self, task: GenerateFragment) -> bool:
        return task.policy == self.before and task.fragment.batch <= task.policy.version + 1

    def _has_lost(self, task: GenerateFragment) -> bool:
        """Whether the fragment's version is what the updates so far went from."""
        return bool(self.update) and task.policy == self.policy

    def _take(self) -> None:
        """Adopt the weights of the step; the version before is kept as the second set."""
        assert self.ahead is not None
        self.before, self.policy, self.ahead = self.policy, self.ahead, None

    @property
    def state(self) -> str:
        """Checksum of what its next step goes from."""
        if self.update:
            return self.inner[:32]
        newest = self.ahead or self.policy
        assert newest is not None
        return newest.weights_digest[:32]

    def _begin_fragment(self, task: GenerateFragment) -> None:
        if self._is_stale(task):
            self._release(task, "stale")
        else:
            self._generate(task)

    def _generate(self, task: GenerateFragment) -> None:
        if self.gathered != task.policy:
            self.gathered = task.policy
            self.overhead_s += self.timing.gather
        if self.loan is not None:
            kept = self._kept
            begun = kept.pop(slot) if (slot := task.fragment.slot) in kept else self._begun(task)
            self._go_on(begun)
            return
        seconds = self._drawn(task)
        self.history.works(f"{self.address}/0", "generate", 0.0, seconds)

        def done() -> None:
            self._store(task, seconds)

        self._occupy(seconds, done)

    def _drawn(self, task: GenerateFragment) -> float:
        seconds = self.timing.help(self.kind, task.fragment.num_samples)
        return self.history.drawn(self.name, seconds)

    def _occupy(self, seconds: float, done: Callable[[], None]) -> None:
        self._busy, overhead, self.overhead_s = True, self.overhead_s, 0.0
        self._use += 1
        use = self._use

        def end() -> None:
            if self._use == use:
                self._busy = False
                done()
                self._next()

        self.world.after(seconds + overhead, end)

    def _release(self, task: GenerateFragment, reason: Literal["stale", "returned"]) -> None:
        slot = task.fragment.slot
        self.broker.publish(FragmentReleased(slot=slot, worker=self.address, reason=reason))

    # --- loans ---

    @property
    def _may_generate(self) -> bool:
        """Whether it takes another denoising step now."""
        loan, now = self.loan, self.world.now
        return loan is None or (may_generate(loan, now) and not self._pieces)

    def _lend(self, message: Message) -> None:
        """Follow the scheduler."""
        assert isinstance(message, SetDevice) and self.loan is not None
        before, self.loan = self.loan, apply(self.loan, message, self.world.now)
        if self.loan is before:
            return
        if message.mode == "train" and not message.keep:
            self._give_back()
        self.report()
        self._call_back()
        self._next()

    def _give_back(self) -> None:
        """Give back all fragments, which others will generate."""
        if self._current is not None:
            self._stop(self._current)
        tasks, self._tasks = self._tasks, deque()
        self._kept.clear()
        for task in tasks:
            self._release(task, "returned")

    def _begun(self, task: GenerateFragment) -> UnfinishedFragment:
        seconds = self._drawn(task)
        return UnfinishedFragment(task=task, total=seconds, left=seconds)

    def _go_on(self, work: UnfinishedFragment) -> None:
        """Generate the rest of a fragment, unless other work comes first."""
        work.since, self._current = self.world.now + self.overhead_s, work

        def done() -> None:
            self._current = None
            self.history.worked(f"{self.address}/0", "generate", work.since)
            self._store(work.task, work.total)

        self._occupy(work.left, done)

    def _call_back(self) -> None:
        """Stop after the current denoising step, if the fragment may not continue."""
        work, use = self._current, self._use
        if work is None or self._may_generate:
            return
        step, done = work.total / self.timing.steps, self.world.now - work.since

        def stop() -> None:
            if self._use == use and not self._may_generate:
                self._stop(work)
                self._next()

        self.world.after(-done % step if step else 0.0, stop)

    def _stop(self, work: UnfinishedFragment) -> None:
        """Keep what is done of a fragment."""
        done = max(0.0, self.world.now - work.since)
        self.history.worked(f"{self.address}/0", "generate", self.world.now - done)
        work.left = max(0.0, work.left - done)
        self._kept[work.task.fragment.slot] = work
        self._tasks.appendleft(work.task)
        self._current, self._busy = None, False
        self._use += 1

    # --- versions ---

    def _published(self, message: Message) -> None:
        assert isinstance(message, PolicyPublished)
        self.newest = max(self.newest, message.policy.version)
        if self.comes_to < self.newest:  # it has no total to step to it
            self._load(message.policy)

    def _load(self, policy: Policy) -> None:
        """Load weights, moments and average."""
        self.comes_to = policy.version

        def loaded() -> None:
            self.policy = policy
            self._hold()

        def arrived() -> None:
            if self.comes_to == policy.version:
                self.history.works(f"{self.address}/0", "load", self.timing.adopt_state, 0.0)
                self._occupy_when_free(self.timing.adopt_state, loaded)

        if self.site is None or not policy.version:  # each member makes the first version
            arrived()
        else:
            size = STATE_PARTS * self.timing.sum_bytes
            self.site.fetch(policy.version, size, self.address, arrived)

    def _hold(self) -> None:
        newest = self.ahead or self.policy
        assert newest is not None
        self.holds = Holds(
            version=newest.version, checksum=self.state, update=self.update,
            sum_bytes=self.timing.sum_bytes, site=self.site.site.name if self.site else "",
        )  # fmt: skip
        self.report()

    def _occupy_when_free(self, seconds: float, done: Callable[[], None]) -> None:
        if self._busy:
            self.world.after(0.01, lambda: self._occupy_when_free(seconds, done))
        else:
            self._occupy(seconds, done)
