"""Which samples a run keeps a small picture of, once their trajectories and media are deleted.

The device that generates a sample stores its preview with it. The maximum number follows from the
recipe alone, without counting: every step, if `run.preview_mb` has space for them. Otherwise one
half of the room is for steps that keep theirs for good, the first and the last one and as many
between them, evenly apart; the other half is for the newest steps, and what leaves them is deleted
by the scheduler. If all samples of a few steps would be too many, only a step's first groups have
previews.
"""

from dataclasses import dataclass
from typing import Self

from shared.recipe.recipe import Recipe
from shared.run.layout import KEPT_BATCHES, NEWEST_BATCHES, previews_folder
from shared.store.previews import MAX_UNSCALED_SIDE

PREVIEW_BYTES = 8192
"""Largest preview of a sample; one of a usual picture has half of it."""
PNG_BYTES = 128
"""Overhead of a PNG file besides its pixels and a byte per row."""
MAX_BATCH_AGE = KEPT_BATCHES + NEWEST_BATCHES
"""Batches by which the one that the scheduler clears away is older than the newest one."""
MIN_WHOLE_STEPS = 8
"""Number of steps that are better shown in part than fewer of them as a whole."""


@dataclass(frozen=True, slots=True)
class PreviewRule:
    """Which groups of which batches have previews."""

    batches: frozenset[int] = frozenset()
    """Batches that keep theirs for good."""
    groups: int = 0
    """Number of the first groups of a batch that have."""
    newest: int = 0
    """Number of batches up to the one that is cleared away that have some, whichever they are."""

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        """Return the rule that a recipe asks for."""
        batch, steps = recipe.batch, recipe.run.steps
        room = int(recipe.run.preview_mb * 1e6) // preview_bytes(recipe)
        if steps * batch.groups * batch.group_size <= room:
            return cls(frozenset(range(steps)), batch.groups)
        shown, groups = shares(room // 2, steps, batch.groups, batch.group_size)
        newest = room // (groups * batch.group_size) - shown - MAX_BATCH_AGE if groups else 0
        if newest > 0:
            return cls(evenly(shown, steps), groups, newest)
        shown, groups = shares(room, steps, batch.groups, batch.group_size)
        return cls(evenly(shown, steps), groups)

    def has(self, batch: int, group: int) -> bool:
        """Return whether samples of a group get previews."""
        return group < self.groups and (batch in self.batches or self.newest > 0)

    def keeps(self, batch: int, cleared: int) -> bool:
        """Return whether a batch still has its previews when what ``cleared`` has left is cleared
        away, `MAX_BATCH_AGE` batches after it was made."""
        return batch in self.batches or batch > cleared - self.newest


def preview_bytes(recipe: Recipe) -> int:
    """Return the bytes of a sample's preview at most: small pictures are kept as they are."""
    height, width = recipe.model.height, recipe.model.width
    if max(height, width) > MAX_UNSCALED_SIDE:
        return PREVIEW_BYTES
    return min(PREVIEW_BYTES, height * (3 * width + 1) + PNG_BYTES)


def shares(samples: int, steps: int, groups: int, group_size: int) -> tuple[int, int]:
    """Return the steps, and the groups of each, with at most this many samples.

    >>> shares(4000, 100, 16, 8), shares(4000, 100, 64, 24), shares(4000, 20, 4, 4)
    ((31, 16), (8, 20), (20, 4))
    """
    whole = samples // (groups * group_size)
    shown = min(steps, max(whole, MIN_WHOLE_STEPS), samples // group_size)
    return (shown, min(groups, samples // (shown * group_size))) if shown else (0, 0)


def evenly(number: int, total: int) -> frozenset[int]:
    """Return this many of the first numbers, including the first and the last.

    >>> sorted(evenly(4, 10)), sorted(evenly(1, 10)), sorted(evenly(0, 10))
    ([0, 3, 6, 9], [0], [])
    """
    if number < 2:
        return frozenset(range(number))
    return frozenset(round(place * (total - 1) / (number - 1)) for place in range(number))


def preview_key(run: str, batch: int, group: int, first_sample: int, attempt: int) -> str:
    """Return where the previews of a fragment are."""
    return f"{previews_folder(run, batch)}/{group}.{first_sample}.{attempt}"
