"""Content of a member's sum, and which of the scheduler's messages the member follows. No I/O.

    message        it is followed if                                          else
    TrainPiece     it belongs to the batch that is trained from the version in use     dropped
                   use, of the update that is next, and of this sum, or a
                   later one: that begins empty
    ExchangeSums   it is newer than every round before,                       dropped
                   names this member,                                         left out
                   and its sum is made of exactly its share                   missed
    TakeStep       the total of that round is here, with this sum id          dropped

A member that has stepped follows no other message of that batch, or of that update: not even of a
later attempt, in which others train it again. Then it fetches what they have made of it.
"""

from dataclasses import dataclass, field
from typing import Literal

from shared.messages.fluid import ExchangeSums, Piece, Share, TakeStep, TrainPiece, UpdateMessage

RoundVerdict = Literal["follow", "missed", "left_out", "drop"]


@dataclass(frozen=True, slots=True, order=True)
class SumKey:
    """Names a sum of this member's; a later one is larger."""

    batch: int
    attempt: int
    number: int


@dataclass(slots=True)
class Ledger:
    address: str
    version: int = -1
    """Version of the weights in use, committed or not: the next step is for the batch of this
    number."""
    update: int = 0
    """Number of the batch's update that the next step is."""
    key: SumKey = SumKey(-1, 0, 0)
    """The newest sum that was announced to this member."""
    pieces: set[Piece] = field(default_factory=set)
    """Pieces in the sum."""
    is_spoilt: bool = False
    """Whether something else is in it as well: a part of a piece that failed."""
    attempt: int = 0
    """The newest attempt at the batch that was heard of."""
    round: int = -1
    """The newest round of that attempt."""
    total: str | None = None
    """Digest of the total of that round, once it is here."""

    def use(self, version: int) -> None:
        """Another version is in use: what was summed at the one before is worth nothing."""
        self.version, self.key, self.attempt = version, SumKey(version, 0, -1), 0
        self.update = 0
        self._empty()
        self._forget_rounds()

    def go_on(self) -> None:
        """An update is taken that makes no version: what was summed before it is in it."""
        self.update, self.total = self.update + 1, None
        self.key = SumKey(self.version, self.attempt, -1)
        self._empty()

    def begin_piece(self, message: TrainPiece) -> bool:
        """Whether to train a piece. The caller empties the sum if `is_empty` after this."""
        key = SumKey(message.batch, message.attempt, message.sum_number)
        if not self._is_next(message) or key < self.key:
            return False
        self._advance(key)
        return message.piece not in self.pieces

    def add(self, piece: Piece) -> None:
        self.pieces.add(piece)

    @property
    def is_empty(self) -> bool:
        return not self.pieces and not self.is_spoilt

    def hear_round(self, message: ExchangeSums) -> RoundVerdict:
        """Decide about a round, which ends every earlier one."""
        share = next((each for each in message.shares if each.worker == self.address), None)
        newest = self.attempt, self.round
        if not self._is_next(message) or (message.attempt, message.round) <= newest:
            return "drop"
        if message.attempt > self.attempt:
            self._advance(SumKey(message.batch, message.attempt, 0))
        self.attempt, self.round, self.total = message.attempt, message.round, None
        if share is None:
            return "left_out"
        return "follow" if self.is_exactly(message, share) else "missed"

    def is_current(self, message: ExchangeSums) -> bool:
        """Whether no other round, and no other version, has come since."""
        current = self.attempt, self.round
        return self._is_next(message) and current == (message.attempt, message.round)

    def hold(self, message: ExchangeSums, sum_id: str) -> None:
        """Note that the total of a round is here."""
        assert self.is_current(message)
        self.total = sum_id

    def hear_step(self, message: TakeStep) -> bool:
        """Whether to take a step: once, by the total that is here."""
        current, named = (self.attempt, self.round), (message.attempt, message.round)
        return self._is_next(message) and current == named and self.total == message.sum_id

    def is_exactly(self, message: ExchangeSums, share: Share) -> bool:
        """Whether the sum is made of a share, the whole of it and nothing else."""
        key = SumKey(message.batch, message.attempt, share.sum_number)
        if key > self.key and not share.pieces:
            self._advance(key)
        return self.key == key and not self.is_spoilt and self.pieces == set(share.pieces)

    def _is_next(self, message: UpdateMessage) -> bool:
        """Whether it is about the step that is next here."""
        return (message.batch, message.update) == (self.version, self.update)

    def _advance(self, key: SumKey) -> None:
        if key > self.key:
            self.key = key
            self._empty()

    def _empty(self) -> None:
        self.pieces, self.is_spoilt = set(), False

    def _forget_rounds(self) -> None:
        self.round, self.total = -1, None
