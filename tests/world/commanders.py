"""Sees that one scheduler commands at a time: a lease is confirmed by its holder alone.

A scheduler that sends commands after another's epoch has begun is heeded by nobody, so that no
record shows it; but what it sends is work for nothing, and a lease that two hold is none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from services.scheduler.shell.lease import Lease
from tests.world.world import World

WIPE = "fault wipe nats"
LOST_S = 10.0
"""After a loss of the register another takes the lease at once, while its holder goes on."""


@dataclass(slots=True)
class Commanders:
    world: World
    violations: list[str] = field(default_factory=list)
    _newest: tuple[int, float] = (0, 0.0)
    """The newest epoch, and when it began."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch all leases of the world."""
        begin, confirm = Lease._begin, Lease.confirm

        async def begun(lease: Lease, revision: int, began: float) -> bool:
            is_held = await begin(lease, revision, began)
            if is_held:
                self._newest = max(self._newest, (lease.epoch, self.world.loop.now))
            return is_held

        async def confirmed(lease: Lease) -> None:
            await confirm(lease)
            self._look(lease.epoch)

        with patch.object(Lease, "_begin", begun), patch.object(Lease, "confirm", confirmed):
            yield

    def _look(self, epoch: int) -> None:
        newest, since = self._newest
        if epoch < newest and not self.violations and not self._is_excused():
            seconds = self.world.loop.now - since
            self.violations.append(
                f"epoch {epoch} commands {seconds:.2f} s after epoch {newest} has begun"
            )

    def _is_excused(self) -> bool:
        wipes = [float(line.split()[0]) for line in self.world.log if WIPE in line]
        return bool(wipes) and self._newest[1] < wipes[-1] + LOST_S
