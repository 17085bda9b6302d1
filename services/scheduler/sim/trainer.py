"""The trainer of the simulated cluster: one optimizer step per batch, and help while it waits.

Commits are made by exclusive create, as in the object store: they are the truth that survives it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from services.scheduler.sim.broker import Broker, Subscription
from services.scheduler.sim.commits import Commits, next_policy
from services.scheduler.sim.devices import REF, result_of
from services.scheduler.sim.history import History
from services.scheduler.sim.timing import Timing
from services.scheduler.sim.world import Process
from shared import subjects
from shared.admission import Admissible, check_admission
from shared.contracts import (
    FragmentFailed,
    FragmentReleased,
    GenerateFragment,
    GroupTrained,
    Message,
    Policy,
    PolicyPublished,
    SetDevice,
    TrainGroup,
)
from shared.errors import AdmissionError
from shared.loan import Loan, apply, may_generate, tick

ANNOUNCE_S = 0.01
"""From a commit to its announcement: a trainer may die in between."""


@dataclass(slots=True)
class Helping:
    """A fragment on one of the trainer's devices."""

    task: GenerateFragment
    left: float
    """Seconds of generation still to do."""
    total: float
    generation: int


@dataclass(slots=True)
class SimTrainer:
    process: Process
    broker: Broker
    history: History
    timing: Timing
    address: str
    num_groups: int
    group_size: int
    slots: int
    max_staleness: int
    commits: Commits
    in_order: bool = False
    report: Callable[[], None] = lambda: None
    """Tells the scheduler at once what the device is used for."""
    loan: Loan = field(default_factory=Loan)
    policy: Policy | None = None
    """Whose weights it has in memory."""
    _groups: Subscription | None = None
    _ready: dict[int, TrainGroup] = field(default_factory=dict)
    _trained: dict[int, TrainGroup] = field(default_factory=dict)
    _training: bool = False
    _helping: list[Helping] = field(default_factory=list)
    _waiting: deque[GenerateFragment] = field(default_factory=deque)
    _running: bool = False
    """The devices are in the middle of a denoising step."""
    _switched: bool = False
    """The devices are set up for generation."""

    def start(self) -> None:
        """Begin from the newest commit, or make the first one."""
        if not self.commits.versions:
            self.commits.create(next_policy(None, ()), None, (), self.address)
        self.broker.subscribe(self.process, subjects.TASK, self._given, self._is_mine)
        self.broker.subscribe(self.process, subjects.DEVICE, self._told, self._is_mine)
        self._open(0.0)

    @property
    def version(self) -> int:
        return -1 if self.policy is None else self.policy.version

    def _is_mine(self, message: Message) -> bool:
        return isinstance(message, GenerateFragment | SetDevice) and message.worker == self.address

    def _open(self, seconds: float) -> None:
        """Announce the newest commit, and read the groups of its batch from the first."""
        self.policy = self.commits.versions[-1].policy
        self._ready, self._trained = {}, {}
        self.broker.send(self.process, PolicyPublished(
            policy=self.policy, weights=REF, worker=self.address, seconds=seconds
        ))  # fmt: skip
        if self._groups is not None:
            self._groups.cancel()
        version = self.version
        self._groups = self.broker.subscribe(
            self.process, subjects.TRAIN, self._received,
            lambda m: isinstance(m, TrainGroup) and m.batch == version,
        )  # fmt: skip
        self._drop_stale()

    def _admissible(self) -> Admissible:
        policies = [commit.policy for commit in self.commits.versions[: self.version + 1]]
        return tuple(reversed(policies[-1 - self.max_staleness :]))

    def _received(self, message: Message) -> None:
        assert isinstance(message, TrainGroup)
        if message.batch != self.version or message.group in self._trained:
            return
        refused = False
        for fragment in message.fragments:
            try:
                check_admission(fragment, message, self._admissible())
            except AdmissionError as error:
                refused = True
                slot = fragment.fragment.slot
                self.broker.send(
                    self.process, FragmentFailed(slot=slot, stage="admission", reason=str(error))
                )
        if not refused:
            self._ready[message.group] = message
            self._act()

    def _act(self) -> None:
        """Train what is ready as soon as no device is in the middle of a step; else help."""
        if self._training or self._running:
            return
        group = self._next_group()
        if group is not None:
            self._train(group)
        elif may_generate(self.loan, self.process.world.now):
            self._help()

    def _next_group(self) -> int | None:
        left = [index for index in self._ready if index not in self._trained]
        if not left:
            return None
        return min(left) if not self.in_order or min(left) == len(self._trained) else None

    def _train(self, index: int) -> None:
        self._training = True
        group = self._ready[index]
        back = self.timing.switch / 2 if self._switched else 0.0
        self._switched = False
        seconds = self.history.noisy(self.timing.train(self.group_size))
        self.history.trains(self.address, group, back, seconds)

        def done() -> None:
            self._training = False
            self._trained[index] = group
            self.history.trained(self.address, group)
            self.broker.send(self.process, GroupTrained(
                batch=group.batch, group=index, attempt=group.attempt, worker=self.address,
                seconds=seconds,
            ))  # fmt: skip
            if len(self._trained) == self.num_groups:
                self._commit()
            else:
                self._act()

        self.process.after(back + seconds, done)

    def _commit(self) -> None:
        self._training = True
        parent = self.policy
        trained = tuple(self._trained[index] for index in sorted(self._trained))
        policy = next_policy(parent, trained)

        def done() -> None:
            accepted = self.commits.create(policy, parent, trained, self.address)
            self.history.committed(self.address, policy.version, accepted)
            self.process.after(ANNOUNCE_S, announce)

        def announce() -> None:
            """Or, if another trainer was first, go on from what that has made."""
            self._training = False
            self._open(self.timing.commit)
            self._act()

        self.history.commits(self.address, self.timing.commit)
        self.process.after(self.timing.commit, done)

    def _given(self, message: Message) -> None:
        assert isinstance(message, GenerateFragment)
        self._waiting.append(message)
        self._act()

    def _told(self, message: Message) -> None:
        assert isinstance(message, SetDevice)
        self.history.told(self.address, message)
        before, self.loan = self.loan, apply(self.loan, message, self.process.world.now)
        if self.loan is before:
            return
        if message.mode == "train" and not message.keep:
            self._drop()
        if message.mode == "generate":
            self.process.after(message.max_seconds + 1e-6, self._expire)
        self.report()
        self._act()

    def _drop(self) -> None:
        """Say what is dropped: a task may have come before the command, or a restarted scheduler
        may not know that it gave it."""
        for task in [*(work.task for work in self._helping), *self._waiting]:
            self._release(task, "returned")
        self._helping.clear()
        self._waiting.clear()

    def _expire(self) -> None:
        before, self.loan = self.loan, tick(self.loan, self.process.world.now)
        if self.loan is not before:
            self.history.expired(self.address, self.loan.generation)
            self.report()

    def _help(self) -> None:
        """Every device takes one denoising step of its fragment."""
        assert self.policy is not None
        while self._waiting and len(self._helping) < self.slots:
            task = self._waiting.popleft()
            if task.policy != self.policy:
                self._release(task, "stale")
                continue
            seconds = self.history.noisy(self.timing.help(task.fragment.num_samples))
            weights = self.policy.weights_digest
            number = self.history.begins(self.address, task, self.version, weights)
            self._helping.append(Helping(task, seconds, seconds, number))
        if not self._helping:
            return
        setup = 0.0 if self._switched else self.timing.switch / 2
        self._switched, self._running = True, True
        stepping = list(self._helping)
        seconds_each = [work.total / self.timing.steps for work in stepping]
        numbers = tuple(work.generation for work in stepping)
        weights = self.policy.weights_digest
        self.history.steps(self.address, setup, seconds_each, numbers, weights)
        self.process.after(setup + max(seconds_each), lambda: self._stepped(stepping))

    def _stepped(self, stepping: list[Helping]) -> None:
        assert self.policy is not None
        self._running = False
        for work in stepping:
            work.left -= work.total / self.timing.steps
            if work.left <= 1e-9 and work in self._helping:
                self._helping.remove(work)
                digest = self.policy.weights_digest
                self.broker.send(self.process, result_of(
                    work.task, digest, self.address, work.total, work.generation
                ))  # fmt: skip
        self._act()

    def _drop_stale(self) -> None:
        """What was begun with weights that are no longer there cannot be finished."""
        for work in [w for w in self._helping if w.task.policy != self.policy]:
            self._helping.remove(work)
            self._release(work.task, "stale")

    def _release(self, task: GenerateFragment, reason: Literal["stale", "returned"]) -> None:
        released = FragmentReleased(slot=task.fragment.slot, worker=self.address, reason=reason)
        self.broker.send(self.process, released)
