"""Slices a group for the devices of a trainer: whoever is free takes the next slice.

One device takes whole groups. Several take a few samples at a time while there is plenty; of a
batch's last groups they take single samples, and only some of their trained steps at a time,
because then every device waits for the last slice.
"""

from dataclasses import dataclass

LAST_GROUPS = 2
"""Number of a batch's last groups, which are sliced finely."""
FINE_PARTS = 3
"""Number of parts that the trained steps of a sample are then divided into."""


@dataclass(frozen=True, slots=True)
class GroupSlice:
    """Some samples of a group, and one part of the trained steps of each."""

    samples: range
    part: int = 0
    num_parts: int = 1

    def steps(self, trained_steps: int) -> range:
        """Return the indices of this part's steps among the trained ones."""
        ends = [trained_steps * part // self.num_parts for part in (self.part, self.part + 1)]
        return range(*ends)


def slice_group(
    group_size: int, num_devices: int, trained_steps: int, *, is_last: bool
) -> list[GroupSlice]:
    """Return slices that hold every (sample, step) of a group once."""
    if num_devices > 1 and is_last:
        return [
            GroupSlice(range(sample, sample + 1), part, num_parts)
            for num_parts in [min(FINE_PARTS, trained_steps)]
            for sample in range(group_size)
            for part in range(num_parts)
        ]
    size = slice_size(group_size, num_devices)
    return [
        GroupSlice(range(first, min(first + size, group_size)))
        for first in range(0, group_size, size)
    ]


def slice_size(group_size: int, num_devices: int) -> int:
    """Return the number of samples of a slice, while there is plenty."""
    return max(1, group_size // num_devices)
