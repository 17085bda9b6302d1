"""What trainers of the simulated cluster have in common: groups come in, one commit per batch.

    groups of batch k -> gradient -> optimizer step -> record of version k + 1 -> announcement

On-policy the next batch begins with the announcement. With one-step asynchrony it begins with the
optimizer step: groups by the version before are trained while record and announcement are made.
Commits are made by exclusive create, as in the object store: they are the truth that survives a
trainer; one that finds its version made by another goes back to the newest.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from services.scheduler.core.state import Plan
from services.scheduler.sim.broker import Broker, Subscription
from services.scheduler.sim.commits import Commits, next_policy
from services.scheduler.sim.devices import REF
from services.scheduler.sim.history import History
from services.scheduler.sim.timing import Timing
from services.scheduler.sim.world import Process
from shared.devices.loan import Loan, apply, tick
from shared.errors import AdmissionError
from shared.messages import subjects
from shared.messages.contracts import (
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
from shared.messages.staleness import Admissible, check_admission

ANNOUNCE_S = 0.01
"""Seconds from a commit to its announcement: a trainer may die in between."""


@dataclass(slots=True)
class Trainer(ABC):
    process: Process
    broker: Broker
    history: History
    timing: Timing
    address: str
    plan: Plan
    commits: Commits
    report: Callable[[], None] = lambda: None
    """Tells the scheduler at once what the device is used for."""
    loan: Loan = field(default_factory=Loan)
    policy: Policy | None = None
    """Version whose weights are in memory."""
    _before: Policy | None = None
    """Version that these weights were made of."""
    _groups: Subscription | None = None
    _ready: dict[int, TrainGroup] = field(default_factory=dict)
    """Admitted groups of the batch, in order of arrival."""
    _trained: dict[int, TrainGroup] = field(default_factory=dict)
    """Those whose gradient is added up."""
    _stepping: bool = False
    """The optimizer has the devices."""
    _storing: bool = False
    """The last step's record is on its way, beside the training of the next batch."""
    _early: list[Message] = field(default_factory=list)
    """Groups by a version that is not stored yet, as far as this trainer knows."""

    @abstractmethod
    def _act(self) -> None:
        """Let the devices do what there is to do; to commit is a part of it."""

    @abstractmethod
    def _given(self, message: Message) -> None:
        """A fragment to generate."""

    @abstractmethod
    def _drop(self) -> None:
        """Give back the fragments that it has, as it was told."""

    @abstractmethod
    def _drop_stale(self) -> None:
        """Give back those that are of other weights than are now in memory, and begin nothing
        anew of what was trained."""

    @abstractmethod
    def _uses_optimizer(self, seconds: float) -> None:
        """All devices, from now on."""

    def start(self) -> None:
        """Begin from the newest commit, or make the first one."""
        if not self.commits.versions:
            self.commits.create(next_policy(None, (), self.address), None, (), self.address)
        self.broker.subscribe(self.process, subjects.TASK, self._given, self._is_mine)
        self.broker.subscribe(self.process, subjects.DEVICE, self._told, self._is_mine)
        self._go_on_from_newest(0.0)

    @property
    def version(self) -> int:
        return -1 if self.policy is None else self.policy.version

    def _is_mine(self, message: Message) -> bool:
        return isinstance(message, GenerateFragment | SetDevice) and message.worker == self.address

    def _go_on_from_newest(self, seconds: float) -> None:
        """Whoever made it."""
        policies = [commit.policy for commit in self.commits.versions[-2:]]
        self._announce(policies[-1], seconds)
        self._begin_batch(policies[-1], policies[0] if len(policies) > 1 else None)

    def _announce(self, policy: Policy, seconds: float) -> None:
        self.broker.send(self.process, PolicyPublished(
            policy=policy, weights=REF, worker=self.address, seconds=seconds, checksum=None,
        ))  # fmt: skip

    def _begin_batch(self, policy: Policy, before: Policy | None) -> None:
        """Begin a batch with new weights; its groups are read from the first."""
        self.policy, self._before = policy, before
        self._ready, self._trained, self._early = {}, {}, []
        if self._groups is not None:
            self._groups.cancel()
        version = policy.version
        self._groups = self.broker.subscribe(
            self.process, subjects.TRAIN, self._received,
            lambda m: isinstance(m, TrainGroup) and m.batch == version,
        )  # fmt: skip
        self._drop_stale()

    def _admissible(self) -> Admissible:
        assert self.policy is not None
        stale = self._before if self.plan.schedule.staleness_limit else None
        return (self.policy,) if stale is None else (self.policy, stale)

    def _received(self, message: Message) -> None:
        """A group of this batch. One that it has already is left alone, whatever the attempt."""
        assert isinstance(message, TrainGroup)
        known = message.group in self._ready or message.group in self._trained
        if message.batch != self.version or known:
            return
        if self._storing and message.policy.version == self.version:
            self._early.append(message)  # by this trainer's version, or by another's of that number
        elif self._is_admitted(message):
            self._take(message)

    def _is_admitted(self, group: TrainGroup) -> bool:
        refused = False
        for fragment in group.fragments:
            try:
                check_admission(fragment, group, self._admissible())
            except AdmissionError as error:
                refused = True
                slot = fragment.fragment.slot
                self.broker.send(
                    self.process,
                    FragmentFailed(slot=slot, stage="admission", reason=str(error), worker=None),
                )
        return not refused

    def _take(self, group: TrainGroup) -> None:
        self._ready[group.group] = group
        self._act()

    def _count(self, group: TrainGroup, seconds: float) -> None:
        """Its whole gradient is added up."""
        self._trained[group.group] = group
        self.broker.send(self.process, GroupTrained(
            **group.answer_fields, worker=self.address, seconds=seconds,
        ))  # fmt: skip

    @property
    def _holds(self) -> bool:
        """Whether groups wait for the rest of the batch, because of a deviation over all of it."""
        return self.plan.schedule.holds_groups and len(self._ready) < self.plan.num_groups

    @property
    def _is_complete(self) -> bool:
        return len(self._trained) == self.plan.num_groups

    def _commit(self) -> None:
        """The optimizer step, and then its record; one record after the other."""
        if self._storing:
            return
        assert self.policy is not None
        self._stepping = True
        seconds = self.timing.commit + (0.0 if self._overlaps else self.timing.publish)
        self._uses_optimizer(seconds)
        parent = self.policy
        trained = tuple(self._trained[index] for index in sorted(self._trained))
        policy = next_policy(parent, trained, self.address)
        if not self._overlaps:
            self.process.after(seconds, lambda: self._store(policy, parent, trained))
            return

        def stepped() -> None:
            self._stepping, self._storing = False, True
            self.process.after(self.timing.publish, lambda: self._store(policy, parent, trained))
            self._begin_batch(policy, parent)
            self._act()

        self.process.after(seconds, stepped)

    @property
    def _overlaps(self) -> bool:
        return self.plan.schedule.staleness_limit > 0

    def _store(self, policy: Policy, parent: Policy, trained: tuple[TrainGroup, ...]) -> None:
        accepted = self.commits.create(policy, parent, trained, self.address)
        if accepted:
            self.history.committed()
        goes_on = accepted and self._overlaps
        self.process.after(ANNOUNCE_S, lambda: self._stored(policy if goes_on else None))

    def _stored(self, policy: Policy | None) -> None:
        """``policy``: of the batch that is being trained already. Without it the newest commit's
        is next, which is another trainer's if that was first."""
        self._stepping = self._storing = False
        seconds = self.timing.commit + self.timing.publish
        if policy is None:
            self._go_on_from_newest(seconds)
        else:
            self._announce(policy, seconds)
            early, self._early = self._early, []
            for message in early:
                self._received(message)
        self._act()

    def _told(self, message: Message) -> None:
        assert isinstance(message, SetDevice)
        before, self.loan = self.loan, apply(self.loan, message, self.process.world.now)
        if self.loan is before:
            return
        if message.mode == "train" and not message.keep:
            self._drop()
        if message.mode == "generate":
            self.process.after(message.max_seconds + 1e-6, self._expire)
        self.report()
        self._act()

    def _expire(self) -> None:
        before, self.loan = self.loan, tick(self.loan, self.process.world.now)
        if self.loan is not before:
            self.report()

    def _release(self, task: GenerateFragment, reason: Literal["stale", "returned"]) -> None:
        released = FragmentReleased(slot=task.fragment.slot, worker=self.address, reason=reason)
        self.broker.send(self.process, released)
