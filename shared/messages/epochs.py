"""Says which commands hold when schedulers take turns: an epoch is a term in which one commands.

Several schedulers may be started for a run; a lease says which one commands (the scheduler's
`lease.py`). The lease alone makes nothing safe: a scheduler that was stopped for a while goes on
with what it was about to send. So every command carries the epoch of its sender, and whoever takes
over begins with a mark in each stream of commands:

    command of 3 | command of 3 | mark of 4 | command of 3 (refused) | command of 4

What stands before the mark was sent in its time, and the new scheduler has read it. What an older
scheduler stores behind the mark is refused by everybody who reads the stream, in the same way,
whenever they read it. Commands without an epoch are those of releases that had none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.messages.records import Record, Token


class EpochRecord(Record):
    """Says whose an epoch is; kept in the object store (`shared.run.epochs`)."""

    epoch: int
    scheduler: Token


@dataclass(frozen=True, slots=True)
class Fence:
    """What a reader of one stream knows of epochs, from what it has read so far."""

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
    fence, found = Fence(), list[bool]()
    for message in stream:
        found.append(not message.is_mark and fence.passes(message.epoch))
        fence = fence.raised(message.epoch)
    return found


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease that is held: by which entry of its register, since which epoch."""

    epoch: int
    revision: int
    """Number of the newest entry that the holder knows to be its own."""

    def goes_on(self, revision: int) -> "HeldLease | None":
        """Return the lease after the holder's next entry, or None if it is another lease.

        Entries that time out leave the register, but numbers go on: an entry that follows the one
        before it shows that nobody held the lease in between.
        """
        return HeldLease(self.epoch, revision) if revision == self.revision + 1 else None


def next_epoch(revision: int, newest: int) -> int:
    """Return the epoch of who has taken the lease with this entry, when ``newest`` was the newest
    epoch before: a register that was lost begins to count anew, and epochs never do."""
    return max(revision, newest + 1)
