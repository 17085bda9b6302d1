"""Learns what the lines of workers cost: seconds per byte, and until a version is there."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from services.scheduler.core.tag.running_median import Estimate

UNMEASURED_RATE = 125e6
"""Bytes per second of a line of which no transfer was measured: 1 Gbit/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineCosts:
    up: Mapping[str, Estimate] = field(default_factory=dict)
    """Seconds per byte that leaves a member for the object store."""
    down: Mapping[str, Estimate] = field(default_factory=dict)
    """Seconds per byte on the way back."""
    version: Mapping[str, Estimate] = field(default_factory=dict)
    """Seconds from a version's publication until a device that fetches it has it."""
    sample_bytes: Estimate = field(default_factory=Estimate)
    """Bytes of a sample that leave a device: its trajectory and its media."""

    def up_seconds(self, worker: str) -> float:
        """Return the seconds per byte on the way up; where that was not measured, on the way down;
        where neither was, of the usual line."""
        found = self.up.get(worker) or self.down.get(worker)
        return 1 / UNMEASURED_RATE if found is None else found.seconds

    def down_seconds(self, worker: str) -> float:
        """Return the seconds per byte on the way down; if it was not measured, on the way up."""
        found = self.down.get(worker)
        return self.up_seconds(worker) if found is None else found.seconds

    def is_measured(self, worker: str) -> bool:
        """Return whether anything is known of a worker's line."""
        return worker in self.up or worker in self.down

    def version_seconds(self, worker: str, num_bytes: int) -> float | None:
        """Return the seconds from a version's publication until a device has its bytes; None while
        nothing is known of its line."""
        if worker in self.version:
            return self.version[worker].seconds
        return num_bytes * self.down_seconds(worker) if self.is_measured(worker) else None

    def sample_up_seconds(self, worker: str) -> float:
        """Return the seconds per sample on the way up; 0 while nothing is known of the line."""
        return self.sample_bytes.seconds * self.up_seconds(worker) if self.up else 0.0

    def sum_seconds(self, worker: str) -> float:
        """Return the seconds per byte of a sum that a member gives, and takes back as a total."""
        return self.up_seconds(worker) + self.down_seconds(worker)

    def observe_link(
        self, worker: str, up: float | None, down: float | None, *, sends: bool = True
    ) -> Self:
        """Learn from seconds per byte in each direction; None: nothing was transferred. The way up
        of a device that sends nothing changes as its way down does."""
        if (
            up is None
            and down is not None
            and not sends
            and worker in self.up
            and worker in self.down
        ):
            up = down * self.up[worker].seconds / self.down[worker].seconds
        both: dict[str, Any] = {}
        for name, seconds, known in (("up", up, self.up), ("down", down, self.down)):
            if seconds is not None:
                both[name] = {**known, worker: known.get(worker, Estimate()).observe(seconds)}
        return replace(self, **both)

    def observe_version(self, worker: str, seconds: float) -> Self:
        estimate = self.version.get(worker, Estimate())
        return replace(self, version={**self.version, worker: estimate.observe(seconds)})
