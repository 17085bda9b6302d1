"""Which samples a run keeps a small picture of, once their trajectories and media are deleted.

Whoever generates a sample stores its preview beside it, in a folder that no retention deletes. How
many there may be follows from the recipe alone, so nobody counts: the first and the last step, and
as many between them, evenly apart, as `run.preview_mb` has room for. Where all samples of a few
steps would be too many, they are those of a step's first groups.
"""

from dataclasses import dataclass
from typing import Self

from shared.recipe.recipe import Recipe
from shared.run.layout import previews_folder

PREVIEW_BYTES = 8192
"""Largest preview of a sample; one of a usual picture has half of it."""
FEWEST_STEPS = 8
"""Number of steps that are better shown in part than fewer of them as a whole."""


@dataclass(frozen=True, slots=True)
class PreviewRule:
    """Says which groups of which batches have previews."""

    batches: frozenset[int] = frozenset()
    groups: int = 0
    """Number of the first groups of such a batch that have."""

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """Return the rule that a recipe asks for."""
        batch, run = recipe.batch, recipe.run
        steps, groups = shares(
            int(run.preview_mb * 1e6) // PREVIEW_BYTES, run.steps, batch.groups, batch.group_size
        )
        return cls(evenly(steps, run.steps), groups)

    def has(self, batch: int, group: int) -> bool:
        """Return whether samples of a group have previews."""
        return batch in self.batches and group < self.groups


def shares(samples: int, steps: int, groups: int, group_size: int) -> tuple[int, int]:
    """Return the steps, and the groups of each, of which so many samples are at most.

    >>> shares(4000, 100, 16, 8), shares(4000, 100, 64, 24), shares(4000, 20, 4, 4)
    ((31, 16), (8, 20), (20, 4))
    """
    whole = samples // (groups * group_size)
    shown = min(steps, max(whole, FEWEST_STEPS), samples // group_size)
    return (shown, min(groups, samples // (shown * group_size))) if shown else (0, 0)


def evenly(number: int, of: int) -> frozenset[int]:
    """Return so many of the first numbers, the first and the last among them.

    >>> sorted(evenly(4, 10)), sorted(evenly(1, 10)), sorted(evenly(0, 10))
    ([0, 3, 6, 9], [0], [])
    """
    if number < 2:
        return frozenset(range(number))
    return frozenset(round(place * (of - 1) / (number - 1)) for place in range(number))


def preview_key(run: str, batch: int, group: int, first_sample: int, attempt: int) -> str:
    """Return where the previews of a fragment are."""
    return f"{previews_folder(run, batch)}/{group}.{first_sample}.{attempt}"
