"""Holds what the scheduler knows of a batch that fluid devices train, and of their sums."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shared.messages.fluid import (
    CommitVersion,
    ExchangeSums,
    Piece,
    Stepped,
    SumHeld,
    TakeStep,
    WeightsStored,
)
from shared.messages.records import ObjectRef, Policy
from shared.messages.workers import Holds

Key = tuple[int, int]
"""Group, and the place of a piece among its pieces."""

STEPPED = ""
"""Is written in the place of an address where a gradient is in a step that was taken already."""
ATTEMPTS_PER_EPOCH = 1000
"""More attempts than a batch needs within one epoch of the scheduler. One that finds nothing of the
batch begins with an attempt that none before it had: members may have sums, or a version, of which
nothing is stored any more."""
WORK_PER_MEMBER = 2
"""Fragments and pieces that a member has: one in work, and one waiting, so that it never waits for
a message."""

T = TypeVar("T")


def with_or_without(members: frozenset[T], each: T, is_in: bool) -> frozenset[T]:
    """Put something into a set, or take it out."""
    if (each in members) == is_in:
        return members
    return members | {each} if is_in else members - {each}


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceState:
    piece: Piece
    worker: str | None = None
    """Address of the member that has it, or has trained it; None: it waits."""
    trained: bool = False
    since: float = 0.0
    """When it was given out."""


def num_rows(piece: Piece, merged_steps: int, ranks: int = 1) -> int:
    """Return the rows (sample, step) of a piece, or of the one of several ranks that trains most of
    its samples; the first ``merged_steps`` of a group's trained steps are one row for all."""
    once = max(0, min(piece.steps.stop, merged_steps) - piece.first_step)
    return -(-piece.num_samples // ranks) * (piece.num_steps - once) + once


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPieces:
    """The pieces of a complete group; pieces of its last samples are cut on demand."""

    attempt: int
    """Attempt of the group."""
    num_samples: int
    """Samples that are trained."""
    next_number: int = 0
    num_cut: int = 0
    """Samples that belong to pieces, whichever of their steps the group computes once."""
    pieces: tuple[PieceState, ...] = ()
    num_failures: int = 0
    num_faults: int = 0
    """Times that members could not read what they were to train of it."""
    merged_steps: int = 0
    """Trained steps that the group computes once for all its samples."""

    @property
    def waiting_rows(self) -> int:
        """Rows of pieces that are cut and that no member has."""
        return sum(num_rows(p.piece, self.merged_steps) for p in self.pieces if p.worker is None)

    @property
    def is_trained(self) -> bool:
        return self.num_cut == self.num_samples and all(each.trained for each in self.pieces)

    @property
    def has_more(self) -> bool:
        """Whether something of it waits for a member."""
        return self.num_cut < self.num_samples or any(p.worker is None for p in self.pieces)


NO_PIECES = GroupPieces(attempt=0, num_samples=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRound:
    """A round that is under way."""

    command: ExchangeSums
    since: float
    silent: frozenset[str]
    """Members of the round that have not answered."""
    held: Mapping[str, SumHeld] = field(default_factory=dict)
    """Address -> what it reports of the total."""
    missed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Address -> whom it has missed."""

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(share.worker for share in self.command.shares)


def begin_round(command: ExchangeSums, now: float) -> ExchangeRound:
    """A round that has just begun."""
    silent = frozenset(share.worker for share in command.shares)
    return ExchangeRound(command=command, since=now, silent=silent)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedStep:
    """The step that was ordered, and what came of it."""

    command: TakeStep
    since: float
    """When the committer was named."""
    holders: tuple[str, ...]
    """Members with the total, in the order of the shares."""
    stepped: Mapping[str, Stepped] = field(default_factory=dict)
    named: CommitVersion | None = None
    """Another committer than the first."""
    stepped_at: float | None = None
    """When the first step was reported."""
    agreed: frozenset[str] = frozenset()
    """Members that have made the committer's version, to the last bit."""

    @property
    def committer(self) -> str:
        return self.command.committer if self.named is None else self.named.worker

    def with_stepped(self, event: Stepped, now: float) -> "OrderedStep":
        """Record a member's step."""
        since = now if self.stepped_at is None else self.stepped_at
        stepped = {**self.stepped, event.worker: event}
        reference, agreed = stepped.get(self.committer), self.agreed
        if event is reference:
            agreed = _agreed(stepped, self.committer)
        elif reference is not None and _is_same(reference, event):
            agreed |= {event.worker}
        return replace(self, stepped=stepped, stepped_at=since, agreed=agreed)

    def with_committer(self, command: CommitVersion, now: float) -> "OrderedStep":
        """Name another committer."""
        return replace(self, named=command, since=now, agreed=_agreed(self.stepped, command.worker))


def _agreed(stepped: Mapping[str, Stepped], committer: str) -> frozenset[str]:
    reference = stepped.get(committer)
    if reference is None:
        return frozenset()
    return frozenset(address for address, each in stepped.items() if _is_same(reference, each))


def _is_same(one: Stepped, other: Stepped) -> bool:
    return one.checksum == other.checksum and one.policy == other.policy


@dataclass(frozen=True, slots=True)
class EndForecast:
    """Forecast of the end of an update's training."""

    min_rows: float
    """Rows of the smallest piece that pays."""
    at: float
    even: float
    """When it would be if all members ended at once."""


@dataclass(frozen=True, slots=True)
class TrainingPace:
    """How fast all members train. With many members it is not recomputed at every event: it sets
    the sizes of pieces and changes slowly."""

    members: frozenset[str]
    rate: float
    """Groups per second."""
    fastest: float
    """Seconds of a group on the fastest member."""
    ending: EndForecast
    times: int = 0
    """How often it was used since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidState:
    """The batch of the newest committed version. Addresses stay when their members are gone."""

    batch: int
    checksum: str | None = None
    """Checksum of weights, moments and average that the next step goes from, if known."""
    first_checksum: str | None = None
    """The same of the version, where updates were taken since."""
    attempt: int = 0
    update: int = 0
    """Number of the update that is trained for; those before it are taken."""
    told_attempt: int = 0
    """The newest attempt that was announced to members by a message of its own."""
    alone_since: float | None = None
    """Time since which no member has the weights of the updates before, if there are any."""
    groups: Mapping[int, GroupPieces] = field(default_factory=dict)
    """Groups that were sent to be trained."""
    ready: frozenset[int] = frozenset()
    """Groups of which a piece waits for a member."""
    trained: frozenset[int] = frozenset()
    """Those that are in sums, all of them."""
    sums: Mapping[str, int] = field(default_factory=dict)
    """Address -> number of its sum, if not 0."""
    queues: Mapping[str, tuple[Key, ...]] = field(default_factory=dict)
    """Address -> pieces that it has and has not trained, in order; see `with_queue`."""
    began: Mapping[str, float] = field(default_factory=dict)
    """Address -> since when its queue has not been empty, if it is not."""
    queued: frozenset[str] = frozenset()
    """Members with at least one piece."""
    loaded: frozenset[str] = frozenset()
    """Members with at least `WORK_PER_MEMBER` pieces."""
    num_cut: int = 0
    """Samples of all groups that belong to pieces."""
    num_pieces: int = 0
    """Pieces of all groups, on all members."""
    waiting_rows: int = 0
    """Rows of pieces that are cut and that no member has."""
    num_given: int = 0
    """Pieces that members have and have not trained."""
    pace: TrainingPace | None = None
    gone: frozenset[str] = frozenset()
    """Addresses of members whose lease has ended."""
    out: frozenset[str] = frozenset()
    """Members that take no part in the training of this attempt any more."""
    round: int = 0
    """Number of the next exchange."""
    num_failures: int = 0
    """Rounds in a row that came to nothing."""
    tried: frozenset[str] = frozenset()
    """Committers that were too slow in those."""
    failure: str = ""
    """Shortage of the last one: member, bytes and seconds."""
    has_losses: bool = False
    """Whether a member's lease has ended in this attempt."""
    num_vain: int = 0
    """Attempts that were given up although no member's lease had ended."""
    exchange: ExchangeRound | None = None
    step: OrderedStep | None = None
    stored: WeightsStored | None = None
    """The newest report that the weights of a version can be fetched that is not committed."""
    former: Mapping[str, Stepped] = field(default_factory=dict)
    """Steps that were taken in earlier attempts."""
    named: int = 0
    """Number of the next `CommitVersion`."""
    former_named: float | None = None
    """When one that stepped in an earlier attempt was last named to commit."""
    holds: Mapping[str, Holds] = field(default_factory=dict)
    """Address -> what the member reports that it could step from."""
    sum_bytes: int = 0
    """Bytes of a sum; 0 if no member has reported them."""
    older: Mapping[str, tuple[Holds, float]] = field(default_factory=dict)
    """Address -> the newest report of something earlier than what is known, and since when."""
    known_members: tuple[tuple[object, ...], frozenset[str]] | None = field(
        default=None, compare=False, repr=False
    )
    """Addresses of the members, and what they follow from; see `members`."""

    @property
    def provisional(self) -> Policy | None:
        """The version that the committer has made and not committed yet."""
        step = self.step
        first = None if step is None else step.stepped.get(step.committer)
        return None if first is None or first.policy.version <= self.batch else first.policy

    @property
    def stored_weights(self) -> ObjectRef | None:
        """Where the weights of the provisional version are, as soon as they are in the store."""
        stored = self.stored
        is_made = stored is not None and stored.policy == self.provisional
        return stored.weights if stored is not None and is_made else None

    @property
    def is_settled(self) -> bool:
        """Whether a member holds the total of the update: none of it is trained again, unless all
        holders are lost."""
        return self.step is not None or (self.exchange is not None and bool(self.exchange.held))

    @property
    def num_given_up(self) -> int:
        """Attempts that this epoch, or the one whose streams it has read, has given up."""
        return self.attempt % ATTEMPTS_PER_EPOCH

    def sum_number(self, address: str) -> int:
        return self.sums.get(address, 0)

    def with_group(self, index: int, group: GroupPieces) -> "FluidState":
        """Replace the pieces of a group, and what is known of them in short."""
        old = self.groups.get(index, NO_PIECES)
        return replace(
            self,
            groups={**self.groups, index: group},
            ready=with_or_without(self.ready, index, group.has_more),
            trained=with_or_without(self.trained, index, group.is_trained),
            num_cut=self.num_cut + group.num_cut - old.num_cut,
            num_pieces=self.num_pieces + len(group.pieces) - len(old.pieces),
            waiting_rows=self.waiting_rows + group.waiting_rows - old.waiting_rows,
        )

    def with_piece(self, key: Key, piece: PieceState) -> "FluidState":
        index, place = key
        group = self.groups[index]
        pieces = (*group.pieces[:place], piece, *group.pieces[place + 1 :])
        return self.with_group(index, replace(group, pieces=pieces))

    def without_group(self, index: int) -> "FluidState":
        """Forget the pieces of a group; the next attempt at it begins with other numbers."""
        groups = dict(self.groups)
        old = groups.pop(index)
        return replace(
            self, groups=groups, ready=self.ready - {index}, trained=self.trained - {index},
            num_cut=self.num_cut - old.num_cut, num_pieces=self.num_pieces - len(old.pieces),
            waiting_rows=self.waiting_rows - old.waiting_rows,
        )  # fmt: skip

    def with_queue(self, address: str, queue: tuple[Key, ...]) -> "FluidState":
        """Set which pieces a member has and has not trained."""
        return replace(
            self, queues={**self.queues, address: queue},
            queued=with_or_without(self.queued, address, bool(queue)),
            loaded=with_or_without(self.loaded, address, len(queue) >= WORK_PER_MEMBER),
            num_given=self.num_given + len(queue) - len(self.queues.get(address, ())),
        )  # fmt: skip

    def without_piece(self, key: Key, address: str) -> "FluidState":
        """Take a piece off a member's queue."""
        left = tuple(each for each in self.queues.get(address, ()) if each != key)
        return self.with_queue(address, left)

    def invalidate_sum(self, address: str) -> "FluidState":
        """Begin another sum at a member: all that is in its sum, or is to be, waits again."""
        state = self
        for index, group in self.groups.items():
            if any(each.worker == address for each in group.pieces):
                pieces = tuple(
                    PieceState(piece=each.piece) if each.worker == address else each
                    for each in group.pieces
                )
                state = state.with_group(index, replace(group, pieces=pieces))
        sums = {**self.sums, address: self.sum_number(address) + 1}
        return replace(state.with_queue(address, ()), sums=sums)

    def owners(self, index: int) -> set[str]:
        """Members with pieces of a group in their sums, or to be."""
        group = self.groups.get(index)
        return set() if group is None else {p.worker for p in group.pieces if p.worker}

    @property
    def busy(self) -> set[str]:
        """Members with any piece in their sums, or to be, or with a total, or a step taken."""
        addresses = {p.worker for group in self.groups.values() for p in group.pieces if p.worker}
        if self.exchange is not None:
            addresses.update(self.exchange.members)
        return addresses | set(self.former) | (set(self.step.stepped) if self.step else set())


def next_update(fluid: FluidState, part: range, checksum: str) -> FluidState:
    """Begin the batch's next update, from the state of this checksum: sums restart, and the groups
    of ``part`` are in a step."""
    state = replace(
        fluid, update=fluid.update + 1, checksum=checksum,
        first_checksum=fluid.first_checksum if fluid.update else fluid.checksum,
        exchange=None, step=None, sums={}, queues={}, queued=frozenset(), loaded=frozenset(),
        num_given=0, num_failures=0, tried=frozenset(), alone_since=None, pace=None,
    )  # fmt: skip
    for index in part:
        group = fluid.groups[index]
        pieces = tuple(replace(each, worker=STEPPED, trained=True) for each in group.pieces)
        state = state.with_group(index, replace(group, pieces=pieces))
    return state


def next_attempt(fluid: FluidState, attempt: int) -> FluidState:
    """Train the batch once more, by all members that could: every sum restarts, and no member is
    excluded."""
    stepped = {} if fluid.step is None else fluid.step.stepped
    steps = {a: each for a, each in stepped.items() if each.policy.version > fluid.batch}
    state = replace(
        fluid, attempt=attempt, exchange=None, step=None, round=0, num_failures=0,
        num_vain=fluid.num_vain + (not fluid.has_losses), tried=frozenset(), has_losses=False,
        out=frozenset(), queues={}, queued=frozenset(), loaded=frozenset(), num_given=0, sums={},
        former={**fluid.former, **steps}, update=0, alone_since=None,
        checksum=fluid.first_checksum if fluid.update else fluid.checksum,
    )  # fmt: skip
    for index, group in fluid.groups.items():
        pieces = tuple(PieceState(piece=each.piece) for each in group.pieces)
        state = state.with_group(index, replace(group, pieces=pieces))
    return state
