"""Sees what has to hold at every moment of a world, and what no record would show.

One scheduler commands at a time. Who sends commands after another's epoch has begun is heeded by
nobody; but it is work for nothing, and a lease that two hold is none. And a slot takes one message.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from services.scheduler.shell.lease import Lease
from shared.messages.subjects import STREAMS
from tests.world.nats_streams import StoredMessage, Stream
from tests.world.world import World

LOSSES = ("fault wipe nats", "fault lose nats", "fault clock of nats")
"""After them the register lacks its newest entry, though nobody has given it back, or NATS's clock
takes that for old."""
SLOTTED = {stream.name for stream in STREAMS if stream.slots}
LOST_S = 10.0
"""After a loss of the register another takes the lease at once, while its holder goes on."""


@dataclass(slots=True)
class Invariants:
    world: World
    violations: list[str] = field(default_factory=list)
    _newest: tuple[int, float] = (0, 0.0)
    """The newest epoch, and when it began."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch all leases of the world, and what its streams store."""
        begin, confirm, append = Lease._begin, Lease.confirm, Stream.append

        async def begun(lease: Lease, revision: int, began: float) -> bool:
            is_held = await begin(lease, revision, began)
            if is_held:
                self._newest = max(self._newest, (lease.epoch, self.world.loop.now))
            return is_held

        async def confirmed(lease: Lease) -> None:
            await confirm(lease)
            self._look(lease.epoch)

        def appended(stream: Stream, made: StoredMessage) -> None:
            if stream.name in SLOTTED and stream.last_of(made.subject) is not None:
                self.violations.append(f"{made.subject} takes a second message")
            append(stream, made)

        with (
            patch.object(Lease, "_begin", begun),
            patch.object(Lease, "confirm", confirmed),
            patch.object(Stream, "append", appended),
        ):
            yield

    def _look(self, epoch: int) -> None:
        newest, since = self._newest
        if epoch < newest and not self.violations and not self._is_excused():
            seconds = self.world.loop.now - since
            self.violations.append(
                f"epoch {epoch} commands {seconds:.2f} s after epoch {newest} has begun"
            )

    def _is_excused(self) -> bool:
        said = (line for line in self.world.log if any(each in line for each in LOSSES))
        lost = [float(line.split()[0]) for line in said]
        return bool(lost) and self._newest[1] < lost[-1] + LOST_S
