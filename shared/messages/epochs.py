"""Decides which commands are valid when schedulers alternate: an epoch is a term in which one
scheduler commands.

Several schedulers may be started for a run; a lease decides which one commands (the scheduler's
`lease.py`). The lease alone is not safe: a scheduler that was stopped for a while continues to send
its next messages. Therefore every command carries the epoch of its sender, and a new scheduler
first writes a mark into each stream of commands:

command of 3 | command of 3 | mark of 4 | command of 3 (refused) | command of 4

Commands in front of the mark were sent in their time, and the new scheduler has read them. Commands
of an older scheduler behind the mark are refused by every reader of the stream, in the same way, at
any time. Commands without an epoch come from releases without epochs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.messages.records import Record, Token


class EpochRecord(Record):
    """The holder of an epoch; kept in the object store by exclusive create."""

    epoch: int
    scheduler: Token


@dataclass(frozen=True, slots=True)
class Fence:
    """Epochs of one stream, as known from the messages read so far."""

    epoch: int = 0

    def passes(self, epoch: int) -> bool:
        """Return whether a command of this epoch holds here."""
        return epoch >= self.epoch

    def raised(self, epoch: int) -> "Fence":
        """Return the fence behind a mark, or a command, of this epoch."""
        return Fence(epoch) if epoch > self.epoch else self


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """A message of a stream, as far as epochs go."""

    epoch: int
    is_mark: bool = False


def holds(stream: Sequence[StreamMessage]) -> list[bool]:
    """Return of each message whether it is a command that holds, by what stands before it."""
    fence, validity = Fence(), list[bool]()
    for message in stream:
        validity.append(not message.is_mark and fence.passes(message.epoch))
        fence = fence.raised(message.epoch)
    return validity


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease that is held: by which entry of its register, since which epoch."""

    epoch: int
    revision: int
    """Number of the newest entry that the holder knows to be its own."""

    def goes_on(self, revision: int) -> "HeldLease | None":
        """Return the lease after the holder's next entry, or None if it is another lease.

        Entries that time out leave the register, but numbers continue: an entry directly after the
        one before it shows that the lease was free in between.
        """
        return HeldLease(self.epoch, revision) if revision == self.revision + 1 else None


def next_epoch(revision: int, newest: int) -> int:
    """Return the epoch of a scheduler that has taken the lease with this entry, when ``newest`` was
    the newest epoch before: a rebuilt register counts from 1, and epochs never repeat."""
    return max(revision, newest + 1)
