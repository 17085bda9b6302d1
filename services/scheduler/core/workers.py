"""The workers that the scheduler knows: immutable, with what every event asks of all of them.

With thousands of devices a look at each of them costs more than everything else that follows from
an event. The set of generating workers changes only when a worker joins, leaves, is excluded or
drained; free capacity changes one device at a time.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

from shared.messages.contracts import FragmentSlot
from shared.messages.workers import DeviceMode

GENERATES = ("rollout", "member")
"""Services of workers that generate any assigned work."""

Exclusion = Literal["late", "returns", "leaves"]
"""late: past its deadline. returns: it returns everything. leaves: it is about to end."""


@dataclass(frozen=True, slots=True)
class AssignedFragment:
    """A fragment that a device has; it takes them in order."""

    slot: FragmentSlot
    num_samples: int
    since: float
    """When the device began it, as far as the scheduler knows."""


@dataclass(frozen=True, slots=True)
class MeasuredConcurrency:
    """How many fragments a device really generates at a time, by the scheduler's own clock."""

    since: float = 0.0
    """When it was given something, having had nothing."""
    num_samples: int = 0
    """Samples that it has finished since."""
    last: float = -math.inf
    """When it has finished something last."""
    fastest: float = math.inf
    """Seconds per sample of what it has finished soonest after it was given it."""

    def after(self, fragment: AssignedFragment, now: float) -> "MeasuredConcurrency":
        """Return what is known after a fragment that it was given at ``held.since``."""
        each = max(0.0, now - fragment.since) / fragment.num_samples
        was_idle = fragment.since > self.last
        return MeasuredConcurrency(
            since=fragment.since if was_idle else self.since,
            num_samples=fragment.num_samples + (0 if was_idle else self.num_samples),
            last=now,
            fastest=min(each, self.fastest),
        )

    def at_a_time(self, now: float) -> float:
        """Return the fragments that it has generated at a time, on average."""
        return self.num_samples * self.fastest / max(now - self.since, 1e-9)


@dataclass(frozen=True, slots=True)
class Loan:
    """The use of its device that a member was ordered (TAG)."""

    number: int = 0
    """Number of the newest `SetDevice` to it; it only grows."""
    mode: DeviceMode = "train"
    """Content of that command."""
    stated_at: float = 0.0
    lent_until: float = 0.0
    observed: tuple[int, DeviceMode] = (0, "train")
    """Loan number and mode that the member reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    address: str
    name: str
    service: str
    concurrency: int
    """Concurrent fragments of the worker: the measured number, at most the declared one; 0 for a
    member that only trains, or is not lent."""
    declared: int = 0
    """Declared number of concurrent fragments, if that is more."""
    shown: MeasuredConcurrency | None = None
    """Work since the device was idle, if it declares several concurrent fragments."""
    kind: str = "cpu"
    ranks: int = 1
    """Processes that share its weights, and the samples of each piece."""
    lent_concurrency: int = 0
    """Fragments that a member generates at the same time while it is lent."""
    loan: Loan | None = None
    """None for a worker that is never lent."""
    assigned: tuple[AssignedFragment, ...] = ()
    excluded: Exclusion | None = None
    """Why the worker is given no work, if it is not."""
    drained: bool = False
    """Whether an operator has asked that it be given nothing new."""
    no_pieces: str = ""
    """Why batches would take longer if it exchanged sums, if they would."""
    no_fragments: str = ""
    """Why batches would take longer if it generated, if they would."""
    share: float = 1.0
    """Share of a batch in which a device that generates has the batch's version."""
    version: int | None = None
    """Newest version of which a device that only generates has the weights, -1 before the first;
    None: it has not reported any."""
    num_returned: int = 0
    """Fragments returned since the last one that it finished."""
    clock_from: float = 0.0
    """Earliest time from which deadlines count: when it joined, was last loading, or has finished
    its last fragment, if it generates one at a time."""
    loading: tuple[float, float] = (-math.inf, -math.inf)
    """When it began to load what it has loaded last, and when it last reported that it does."""

    def having_finished(self, fragment: AssignedFragment, now: float) -> "WorkerState":
        """Return the worker after a fragment that it was given at ``held.since``. A declared
        concurrency counts up to twice the measured one."""
        if self.declared <= 1:
            return self
        shown = (self.shown or MeasuredConcurrency()).after(fragment, now)
        concurrency = max(1, min(self.declared, round(2 * shown.at_a_time(now))))
        return replace(self, shown=shown, concurrency=concurrency)

    def with_loan(self, loan: Loan, now: float) -> "WorkerState":
        """Return the member under another loan: it generates while it is lent."""
        lent = self.lent_concurrency if loan.mode == "generate" else 0
        begins = lent and not self.concurrency  # deadlines count anew
        clock_from = now if begins else self.clock_from
        return replace(self, loan=loan, concurrency=lent, clock_from=clock_from)

    @property
    def takes_work(self) -> bool:
        """Whether this is a rollout device or a member, and is given work."""
        return self.service in GENERATES and self.excluded is None and not self.drained

    @property
    def declines(self) -> str:
        """Return what it does not do because of its line, and why; empty if it does everything."""
        reason = self.no_pieces or self.no_fragments
        if self.no_pieces and self.concurrency and not self.no_fragments:
            return f"generates only: {reason}"
        if self.no_fragments and self.service == "member" and not self.no_pieces:
            return f"trains only: {reason}"
        return f"takes no part: {reason}" if reason else ""

    @property
    def generates(self) -> bool:
        return self.takes_work and self.concurrency > 0 and not self.no_fragments

    def has_room(self, queue_depth: int) -> bool:
        """Whether it may be given another fragment; ``queue_depth``: most per queue."""
        return len(self.assigned) < queue_depth * self.concurrency and not self.no_fragments


@dataclass(frozen=True, slots=True)
class Roles:
    """Roles of the workers; unchanged until a worker joins, leaves or is excluded."""

    places: Mapping[str, int]
    """Place of each rollout device that is not excluded, in the order in which they joined."""
    num_queues: int
    """Fragments that these generate at the same time."""
    rollout: frozenset[str]
    """Addresses of those that are no members: they fetch what they generate with."""
    only_train: tuple[str, ...]
    """Addresses of members that do not generate."""
    lendable: tuple[str, ...]
    """Addresses of members that can be lent."""


class WorkerFilter(Protocol):
    """Is something that events ask of devices that take work, and holds for a number of them."""

    @property
    def batch(self) -> int | None:
        """The batch that it concerns, if any: the batch of the newest filter counts."""

    def holds_for(self, worker: WorkerState) -> bool:
        """Return whether it holds for a device."""


@dataclass(frozen=True, slots=True)
class HasCapacity:
    """Selects workers with fewer fragments per queue."""

    queue_depth: int
    batch: None = None

    def holds_for(self, worker: WorkerState) -> bool:
        return worker.has_room(self.queue_depth)


@dataclass(frozen=True, slots=True)
class FewerThan:
    """Asks who has less than a number of fragments of a batch and those before it; what a member
    that is not lent has kept does not count."""

    batch: int
    number: int

    def holds_for(self, worker: WorkerState) -> bool:
        due = sum(fragment.slot.batch <= self.batch for fragment in worker.assigned)
        return due < self.number or not worker.concurrency


@dataclass(frozen=True, slots=True)
class HoldsNext:
    """Asks who has a fragment of a later batch among the first, as many as it generates at a
    time."""

    batch: int

    def holds_for(self, worker: WorkerState) -> bool:
        return any(
            fragment.slot.batch > self.batch for fragment in worker.assigned[: worker.concurrency]
        )


class Workers(dict[str, WorkerState]):
    """Live workers by address. A change makes another one; what is known of all is kept along."""

    __slots__ = ("_answers", "_roles")

    def __init__(self, workers: Mapping[str, WorkerState] | None = None) -> None:
        super().__init__(workers or {})
        self._roles: Roles | None = None
        self._answers: dict[WorkerFilter, frozenset[str]] = {}

    @property
    def roles(self) -> Roles:
        if self._roles is None:
            rollout = [worker for worker in self.values() if worker.generates]
            self._roles = Roles(
                places={worker.address: place for place, worker in enumerate(rollout)},
                num_queues=sum(worker.concurrency for worker in rollout),
                rollout=frozenset(w.address for w in rollout if w.service == "rollout"),
                only_train=tuple(
                    w.address
                    for w in self.values()
                    if w.takes_work and not w.generates and w.service != "rollout"
                ),
                lendable=tuple(
                    w.address
                    for w in self.values()
                    if w.lent_concurrency and not w.excluded and not w.no_pieces
                ),
            )
        return self._roles

    def with_room(self, queue_depth: int) -> frozenset[str]:
        """Addresses of the devices that generate and have less than so much per queue."""
        return self.asked(HasCapacity(queue_depth))

    def asked(self, question: WorkerFilter) -> frozenset[str]:
        """Addresses of the devices that take work and for which it holds."""
        answer = self._answers.get(question)
        if answer is None:
            addresses = (*self.roles.places, *self.roles.only_train)
            answer = frozenset(a for a in addresses if question.holds_for(self[a]))
            if question.batch is not None:  # nobody asks about the batches before it any more
                kept = (None, question.batch)
                self._answers = {q: a for q, a in self._answers.items() if q.batch in kept}
            self._answers[question] = answer
        return answer

    def changed(self, workers: Iterable[WorkerState]) -> Self:
        """Return the workers with these added or replaced, by address."""
        copy, changed = type(self)(self), list(workers)
        keeps = self._roles is not None
        for worker in changed:
            old = copy.get(worker.address)
            copy[worker.address] = worker
            keeps = keeps and old is not None and _role(old) == _role(worker)
        if keeps:
            copy._roles = self._roles
            copy._answers = {
                question: _followed(answer, question, changed)
                for question, answer in self._answers.items()
            }
        return copy


def _followed(
    addresses: frozenset[str], question: WorkerFilter, changed: Iterable[WorkerState]
) -> frozenset[str]:
    """For whom it holds once these have changed."""
    now = {w.address: question.holds_for(w) for w in changed if w.takes_work}
    gain = [address for address, holds in now.items() if holds and address not in addresses]
    loss = [address for address, holds in now.items() if not holds and address in addresses]
    return addresses.union(gain).difference(loss) if gain or loss else addresses


def _role(worker: WorkerState) -> tuple[object, ...]:
    declined = bool(worker.no_pieces), bool(worker.no_fragments)
    return worker.service, worker.concurrency, worker.excluded, worker.drained, declined
