"""Slices a group for the devices of a trainer: whoever is free takes the next slice.

One device takes whole groups. Several take a few samples at a time while there is plenty; of a
batch's last groups they take single samples, and only some of their trained steps at a time,
because then every device waits for the last slice. A step that all samples of a group begin at one
state is computed once for all of them, so it is one slice, whatever the others are.
"""

from dataclasses import dataclass

FINE_PARTS = 3
"""Number of parts that the trained steps of a sample are then divided into."""


@dataclass(frozen=True, slots=True)
class GroupSlice:
    """Some samples of a group, and one part of the trained steps of each."""

    samples: range
    part: int = 0
    num_parts: int = 1
    first: int = 0
    """Trained step that the parts begin with: those before are another slice's."""
    end: int | None = None
    """Trained step that the parts end before; without it, after the last."""

    def steps(self, trained_steps: int) -> range:
        """Return the indices of this part's steps among the trained ones."""
        end = trained_steps if self.end is None else self.end
        length = end - self.first
        ends = [self.first + length * part // self.num_parts for part in (self.part, self.part + 1)]
        return range(*ends)


def num_last_groups(group_size: int, num_devices: int) -> int:
    """Return the number of a batch's last groups, which are sliced finely: one more than give each
    device a sample."""
    return 1 + -(-num_devices // group_size)


def slice_group(
    group_size: int,
    num_devices: int,
    trained_steps: int,
    *,
    is_last: bool,
    merged_steps: int = 0,
    divides_steps: bool = True,
) -> list[GroupSlice]:
    """Return slices that hold every (sample, step) of a group once.

    The first ``merged_steps`` of the trained steps are those of `Sampling.merged_steps`. Without
    ``divides_steps``, one device trains all other steps of a sample, in the last groups as well.
    """
    merged = []
    if num_devices > 1 and merged_steps:
        merged = [GroupSlice(range(group_size), end=merged_steps)]
    else:
        merged_steps = 0  # all is one slice
    later = trained_steps - merged_steps
    if not later:
        return merged
    if num_devices > 1 and is_last:
        return merged + [
            GroupSlice(range(sample, sample + 1), part, num_parts, merged_steps)
            for num_parts in [min(FINE_PARTS, later) if divides_steps else 1]
            for sample in range(group_size)
            for part in range(num_parts)
        ]
    size = slice_size(group_size, num_devices)
    return merged + [
        GroupSlice(range(first, min(first + size, group_size)), first=merged_steps)
        for first in range(0, group_size, size)
    ]


def slice_size(group_size: int, num_devices: int) -> int:
    """Return the number of samples of a slice, while there is plenty."""
    return max(1, group_size // num_devices)
