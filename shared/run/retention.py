"""Decides which policy versions keep their weights and checkpoint; commit records always stay.

Pure: what exists and who uses it comes in, what may be deleted comes out.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord
from shared.run.layout import checkpoints_folder, weights_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    keep_last: int = 3
    keep_every: int | None = None
    max_staleness: int = 0
    evaluate_every: int | None = None
    """Every how many versions one is evaluated; None if none is."""

    def kept(
        self, newest: int, *, in_use: Collection[int] = (), measured: Collection[int] = ()
    ) -> set[int]:
        """Return the versions from 0 to ``newest`` whose objects are needed or asked for.

        Args:
            in_use: versions that workers report to use.
            measured: versions that are evaluated already.
        """
        last = range(newest - max(self.keep_last, 1 + self.max_staleness) + 1, newest + 1)
        every = () if self.keep_every is None else range(0, newest + 1, self.keep_every)
        due = () if self.evaluate_every is None else range(0, newest + 1, self.evaluate_every)
        wanted = {0, *last, *every, *in_use, *(set(due) - set(measured))}
        return {version for version in wanted if 0 <= version <= newest}


def retention_of(recipe: Recipe) -> Retention:
    return Retention(
        keep_last=recipe.run.keep_last,
        keep_every=recipe.run.keep_every,
        max_staleness=recipe.schedule.staleness_limit,
        evaluate_every=recipe.evaluation.every,
    )


def deletable(records: Sequence[CommitRecord], kept: Collection[int]) -> set[str]:
    """Return the keys of objects that no kept version names.

    An object that no record names stays: it may belong to the version that is being stored.
    """
    of_kept: set[str] = set()
    of_others: set[str] = set()
    for record in records:
        (of_kept if record.policy.version in kept else of_others).update(_keys(record))
    return of_others - of_kept


def _keys(record: CommitRecord) -> list[str]:
    """Return the objects of a record in this run's own folders: no other is ever deleted."""
    folders = (f"{weights_folder(record.run)}/", f"{checkpoints_folder(record.run)}/")
    keys = (record.weights.key, record.checkpoint.key)
    return [key for key in keys if key.startswith(folders)]


def stored_bytes(recipe: Recipe, trained_bytes: int) -> int:
    """Return the most bytes that kept versions take at once, if no evaluation has measured any.

    Args:
        trained_bytes: size of the trained weights in float32. A checkpoint holds AdamW's two
            moments of each of them, and their average with `trainer.ema`.
    """
    retention, steps = retention_of(recipe), recipe.run.steps
    num_versions = len(retention.kept(steps)) + 1  # and the one that is being stored
    num_copies = 1 + 2 + (recipe.trainer.ema is not None)
    return min(num_versions, steps + 1) * num_copies * trained_bytes
