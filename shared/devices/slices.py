"""A part of a group: some samples, and some of the trained steps of each."""

from dataclasses import dataclass

FINE_PARTS = 3
"""Number of parts that the trained steps of a sample are divided into at the end of a batch."""


@dataclass(frozen=True, slots=True)
class GroupSlice:
    samples: range
    first: int = 0
    """Trained step that it begins with."""
    end: int | None = None
    """Trained step that it ends before; without it, after the last."""

    def steps(self, trained_steps: int) -> range:
        """Return the indices of its steps among the trained ones."""
        return range(self.first, trained_steps if self.end is None else self.end)
