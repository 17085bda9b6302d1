"""The messages of fluid devices (`schedule.mode = "fluid"`): pieces, sums, steps and commits.

    TrainPiece        scheduler -> one member  add the gradient of this piece to your sum
    PieceTrained      member -> scheduler      it is in the sum
    PieceReleased     member -> scheduler      it is not, and will not be
    ExchangeSums      scheduler -> members     all pieces are in these sums: form their total
    SumHeld           member -> scheduler      the total is here, and these are its bits
    ExchangeMissed    member -> scheduler      this round came to nothing here
    TakeStep          scheduler -> members     everybody holds this total: take the step, once
    Stepped           member -> scheduler      it is taken, with these bits; the committer's bits
        are sent to all members
    CommitVersion     scheduler -> members     this member commits the new version
    WeightsStored     member -> scheduler      its weights can be fetched; it is not committed
        yet
    BeginAgain        scheduler -> members     the batch is trained again, from its version

A batch may have several updates (`trainer.updates`), one after the other: each is an exchange and a
step of its own, with the groups that are its part. All updates but the last make no version: only a
member that has taken every one of these steps can take the next.

An answer repeats the fields that name its command (`answer_fields`). No field of an answer has a
default in Python, so that mypy finds a field that is left out; fields that are not on the wire when
they are 0 or empty have their default in their type.

A member keeps one sum. Its number grows whenever the scheduler no longer counts on what is in it: a
message with a larger number than the member's begins a sum of zeros, one with a smaller number is
dropped. A reassigned piece has another number, so reports about its earlier assignment do not apply
to it.
"""

from typing import Annotated, Literal, Self, TypedDict

from pydantic import Field, FiniteFloat, model_validator

from shared.limits import MAX_PIECES
from shared.messages.records import (
    Count,
    Digest,
    Level,
    ObjectRef,
    Policy,
    Record,
    Seconds,
    Text,
    Token,
    is_empty,
    wire_name,
)

Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""128 bits, as hexadecimal digits."""
Update = Annotated[int, Field(default=0, ge=0, lt=2**31, exclude_if=is_empty)]
"""Number of an update within its batch."""


class Piece(Record):
    """Names a part of a group's gradient: some samples, and a range of their trained steps.

    Samples are counted among the trained samples of the group, in order: all of them, the best and
    worst (`algorithm.best_of`), or the one pair.
    """

    group: Annotated[Count, wire_name("g")]
    attempt: Annotated[Count, wire_name("a")]
    """Attempt of the group, which names its `TrainGroup`."""
    number: Annotated[Count, wire_name("n")]
    """Grows with every assigned piece of the group, for any samples."""
    first_sample: Annotated[Count, wire_name("s")]
    num_samples: Annotated[Annotated[int, Field(gt=0)], wire_name("c")]
    first_step: Annotated[Count, wire_name("f")]
    """First of the trained steps, counted from 0."""
    num_steps: Annotated[Annotated[int, Field(gt=0)], wire_name("k")]

    @property
    def samples(self) -> range:
        return range(self.first_sample, self.first_sample + self.num_samples)

    @property
    def steps(self) -> range:
        return range(self.first_step, self.first_step + self.num_steps)


class FluidMessage(Record):
    """A message about an attempt at a batch; the common fields come first on the wire."""

    kind: str
    batch: Count
    attempt: Count
    """How often the batch was begun again because everybody who had stepped was lost."""


class UpdateFields(TypedDict):
    batch: int
    attempt: int
    update: int


class PieceFields(UpdateFields):
    worker: str
    piece: Piece
    sum_number: int


class RoundFields(UpdateFields):
    round: int


class UpdateMessage(FluidMessage):
    update: Update
    """Which of the batch's updates it is about."""

    @property
    def answer_fields(self) -> UpdateFields:
        return {"batch": self.batch, "attempt": self.attempt, "update": self.update}


class PieceMessage(UpdateMessage):
    worker: Token
    """Address of the member."""
    piece: Piece
    sum_number: Count
    """Number of the member's sum that it is a part of."""

    @property
    def answer_fields(self) -> PieceFields:
        piece: PieceFields = {
            **super().answer_fields,
            "worker": self.worker, "piece": self.piece, "sum_number": self.sum_number,
        }  # fmt: skip
        return piece


class TrainPiece(PieceMessage):
    kind: Literal["train_piece"] = "train_piece"
    policy: Policy
    """Version at whose weights the gradient is taken, or from which the updates before it went."""


class PieceTrained(PieceMessage):
    kind: Literal["piece_trained"] = "piece_trained"
    seconds: Seconds
    """Device time; 0 if the gradient is zero."""
    pass_rows: Count
    """Rows (sample, step) that a training pass of the device has at most; 0 if it is not known."""


class PieceReleased(PieceMessage):
    """A piece is not in the sum, and will not be."""

    kind: Literal["piece_released"] = "piece_released"
    reason: Literal["draining", "failed", "faulty"]
    """draining: the member ends, and its sum with it. failed: its sum is spoilt, and all pieces in
    it are reassigned. faulty: the group's stored data cannot be trained, which is reported
    separately; the rest of the sum stays."""


class Share(Record):
    """Content of a member's sum; empty, if it only takes part in the step."""

    worker: Token
    sum_number: Count
    pieces: Annotated[tuple[Piece, ...], Field(max_length=MAX_PIECES)] = ()


class RoundMessage(UpdateMessage):
    round: Count
    """Attempt at the exchange; messages of older rounds are dropped."""

    @property
    def answer_fields(self) -> RoundFields:
        return {**super().answer_fields, "round": self.round}


class ExchangeSums(RoundMessage):
    kind: Literal["exchange_sums"] = "exchange_sums"
    policy: Policy
    """Version from which the batch's first step goes."""
    committer: Token
    """Address of the member whose total is the reference; one of the shares."""
    shares: Annotated[tuple[Share, ...], Field(min_length=1)]
    """Disjoint, and all of the batch."""
    max_seconds: Seconds
    """Longest time from this message to `SumHeld`; after it the member reports what it missed."""
    num_failures: Annotated[Count, Field(exclude_if=is_empty)] = 0
    """Rounds just before this one that came to nothing."""
    by_store: Annotated[bool, Field(exclude_if=is_empty)] = False
    """True: sums go through the object store, with any `trainer.exchange`."""
    hosts: Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(exclude_if=is_empty)] = ()
    """Shares per host for the intra-host reduction; empty: every member exchanges its own sum."""
    sites: Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(exclude_if=is_empty)] = ()
    """Hosts per site, whose sums are added before they cross to other sites; empty: they exchange
    directly."""
    up: Annotated[Level, Field(exclude_if="exact".__eq__)] = "exact"
    """How sums are rounded on their way to the committer."""

    @model_validator(mode="after")
    def _committer_takes_part(self) -> Self:
        if self.committer not in [share.worker for share in self.shares]:
            raise ValueError("the committer has no share")
        if self.hosts and sum(self.hosts) != len(self.shares):
            raise ValueError("the hosts have other members than the shares")
        if self.sites and sum(self.sites) != len(self.hosts):
            raise ValueError("the sites have other hosts")
        return self


class SumHeld(RoundMessage):
    kind: Literal["sum_held"] = "sum_held"
    worker: Token
    sum_id: Digest
    """Digest of the bits of the total."""
    norm: FiniteFloat | None
    """Norm of the total; None if it is not finite."""
    finite: bool
    scale: FiniteFloat
    """Factor on the total before the step, by which it is clipped."""
    seconds: Seconds
    """Time from the message of this round to this one."""


class ExchangeMissed(RoundMessage):
    kind: Literal["exchange_missed"] = "exchange_missed"
    worker: Token
    missing: tuple[Token, ...]
    """Addresses of members that did not respond; its own, if its sum does not match its share."""
    reason: Text


class TakeStep(UpdateMessage):
    """Is given once for an attempt and an update; who has stepped takes no other for it."""

    kind: Literal["take_step"] = "take_step"
    round: Count
    """Round whose total it is taken by."""
    sum_id: Digest
    norm: FiniteFloat | None
    finite: bool
    scale: FiniteFloat
    """Norm, finiteness and scale are the committer's, so that all steps have the same bits."""
    committer: Token
    down: Annotated[Level, Field(exclude_if="exact".__eq__)] = "exact"
    """How the change to the next version is rounded."""


class Stepped(UpdateMessage):
    kind: Literal["stepped"] = "stepped"
    worker: Token
    policy: Policy
    """The version that the step has made; it is provisional until it is committed. For an update
    that makes no version: the batch's own."""
    checksum: Checksum
    """Checksum of the bits of weights, moments and average."""
    is_reference: Annotated[bool, Field(default=False, exclude_if=is_empty)]
    """Whether the member was named to commit: all others read its step, and compare theirs.
    Otherwise each of thousands of members would be sent the bits of all."""
    seconds: Seconds


class WeightsStored(FluidMessage):
    """Location of a version's weights, which its committer stores before the optimizer's state and
    the commit record: generating devices need only the weights."""

    kind: Literal["weights_stored"] = "weights_stored"
    worker: Token
    policy: Policy
    weights: ObjectRef


class CommitVersion(FluidMessage):
    """Names a member that has stepped to commit; exclusive create of the record decides."""

    kind: Literal["commit_version"] = "commit_version"
    number: Count
    """How often another one was named before."""
    worker: Token


class BeginAgain(FluidMessage):
    """Begins an attempt whose first update goes from the batch's version: who has taken an update
    of an earlier attempt, and not the last, loads that version."""

    kind: Literal["begin_again"] = "begin_again"


FluidEvent = PieceTrained | PieceReleased | SumHeld | ExchangeMissed | Stepped | WeightsStored
FluidCommand = TrainPiece | ExchangeSums | TakeStep | CommitVersion | BeginAgain
