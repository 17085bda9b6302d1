"""Divides the commands that follow from one event into short bursts, in the order of sending."""

from collections.abc import Iterator, Sequence

from services.scheduler import limits
from shared.messages.contracts import Command, GenerateFragment
from shared.messages.fluid import TrainPiece


def message_bursts(commands: Sequence[Command]) -> Iterator[list[Command]]:
    """Yield the commands to send at once, one wave after the other.

    The broker syncs each message to its disk, a millisecond or more, and delivers none of a burst
    before it has stored all of it. Bursts are therefore short, and each device receives its first
    piece of work before any device receives queued work.
    """
    first, waiting, busy = list[Command](), list[Command](), set[str]()
    for command in commands:
        if isinstance(command, GenerateFragment | TrainPiece):
            (waiting if command.worker in busy else first).append(command)
            busy.add(command.worker)
        else:
            first.append(command)
    for part in (first, waiting):
        for begin in range(0, len(part), limits.MAX_CONCURRENT_SENDS):
            yield part[begin : begin + limits.MAX_CONCURRENT_SENDS]
