"""Holds what the scheduler knows of a batch that fluid devices train, and of their sums."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shared.messages.fluid import (
    CommitVersion,
    ExchangeSums,
    Piece,
    Stepped,
    SumHeld,
    TakeStep,
)
from shared.messages.records import Policy
from shared.messages.workers import Holds

Key = tuple[int, int]
"""Group, and the place of a piece among its pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceState:
    piece: Piece
    worker: str | None = None
    """Address of the member that has it, or has trained it; None: it waits."""
    trained: bool = False
    since: float = 0.0
    """When it was given out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPieces:
    """The pieces of a group that is whole; those of its last samples are cut as they are wanted."""

    attempt: int
    """Attempt of the group."""
    num_samples: int
    """Samples that are trained."""
    next_number: int = 0
    num_cut: int = 0
    """Samples that belong to pieces, whatever of their steps the group computes once."""
    pieces: tuple[PieceState, ...] = ()
    num_failures: int = 0

    @property
    def is_trained(self) -> bool:
        return self.num_cut == self.num_samples and all(each.trained for each in self.pieces)

    @property
    def has_more(self) -> bool:
        """Whether something of it waits for a member."""
        return self.num_cut < self.num_samples or any(p.worker is None for p in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A round that is under way."""

    command: ExchangeSums
    since: float
    held: Mapping[str, SumHeld] = field(default_factory=dict)
    """Address -> what it reports of the total."""
    missed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Address -> whom it has missed."""

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(share.worker for share in self.command.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
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

    @property
    def committer(self) -> str:
        return self.command.committer if self.named is None else self.named.worker


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidState:
    """The batch of the newest committed version. Addresses stay when their members are gone."""

    batch: int
    checksum: str | None = None
    """Checksum of weights, moments and average of the newest committed version, if known."""
    attempt: int = 0
    groups: Mapping[int, GroupPieces] = field(default_factory=dict)
    """Groups that were sent to be trained."""
    ready: frozenset[int] = frozenset()
    """Those of which something waits for a member."""
    trained: frozenset[int] = frozenset()
    """Those that are in sums, all of them."""
    sums: Mapping[str, int] = field(default_factory=dict)
    """Address -> number of its sum, if not 0."""
    queues: Mapping[str, tuple[Key, ...]] = field(default_factory=dict)
    """Address -> pieces that it has and has not trained, in order."""
    gone: frozenset[str] = frozenset()
    """Addresses of members whose lease has ended."""
    out: frozenset[str] = frozenset()
    """Members that take no part in the training of this attempt any more."""
    round: int = 0
    """Number of the next exchange."""
    num_failures: int = 0
    """Rounds in a row that came to nothing."""
    exchange: Exchange | None = None
    step: Step | None = None
    former: Mapping[str, Stepped] = field(default_factory=dict)
    """Steps that were taken in earlier attempts."""
    named: int = 0
    """Number of the next `CommitVersion`."""
    former_named: float | None = None
    """When one that stepped in an earlier attempt was last named to commit."""
    holds: Mapping[str, Holds] = field(default_factory=dict)
    """Address -> what the member reports that it could step from."""

    @property
    def provisional(self) -> Policy | None:
        """The version that the committer has made and not committed yet."""
        step = self.step
        made = None if step is None else step.stepped.get(step.committer)
        return None if made is None else made.policy

    @property
    def is_settled(self) -> bool:
        """Whether somebody holds the total of the batch: nothing of it is trained again, unless
        all that hold it are lost."""
        return self.step is not None or (self.exchange is not None and bool(self.exchange.held))

    def sum_number(self, address: str) -> int:
        return self.sums.get(address, 0)

    def with_group(self, index: int, group: GroupPieces) -> "FluidState":
        """Replace the pieces of a group, and what is known of them in short."""
        ready = self.ready | {index} if group.has_more else self.ready - {index}
        trained = self.trained | {index} if group.is_trained else self.trained - {index}
        groups = {**self.groups, index: group}
        return replace(self, groups=groups, ready=ready, trained=trained)

    def with_piece(self, key: Key, piece: PieceState) -> "FluidState":
        index, place = key
        group = self.groups[index]
        pieces = (*group.pieces[:place], piece, *group.pieces[place + 1 :])
        return self.with_group(index, replace(group, pieces=pieces))

    def without_group(self, index: int) -> "FluidState":
        """Forget the pieces of a group; the next attempt at it begins with other numbers."""
        groups = {each: group for each, group in self.groups.items() if each != index}
        return replace(
            self, groups=groups, ready=self.ready - {index}, trained=self.trained - {index}
        )

    def taken_off(self, key: Key, address: str) -> "FluidState":
        """Take a piece off a member's queue."""
        left = tuple(each for each in self.queues.get(address, ()) if each != key)
        return replace(self, queues={**self.queues, address: left})

    def void(self, address: str) -> "FluidState":
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
        queues = {a: queue for a, queue in self.queues.items() if a != address}
        return replace(state, sums=sums, queues=queues)

    def owners(self, index: int) -> set[str]:
        """Members with pieces of a group in their sums, or to be."""
        group = self.groups.get(index)
        return set() if group is None else {p.worker for p in group.pieces if p.worker is not None}

    @property
    def busy(self) -> set[str]:
        """Members with any piece in their sums, or to be, or with a total, or a step taken."""
        found = {
            each.worker
            for group in self.groups.values()
            for each in group.pieces
            if each.worker is not None
        }
        if self.exchange is not None:
            found.update(self.exchange.members)
        return found | set(self.former) | (set(self.step.stepped) if self.step else set())


def next_attempt(fluid: FluidState, attempt: int) -> FluidState:
    """Train the batch once more, by whoever could: every sum begins anew, and nobody is out."""
    step = fluid.step
    state = replace(
        fluid, attempt=attempt, exchange=None, step=None, round=0, num_failures=0,
        out=frozenset(), queues={}, sums={},
        former={**fluid.former, **(step.stepped if step is not None else {})},
    )  # fmt: skip
    for index, group in fluid.groups.items():
        pieces = tuple(PieceState(piece=each.piece) for each in group.pieces)
        state = state.with_group(index, replace(group, pieces=pieces))
    return state
