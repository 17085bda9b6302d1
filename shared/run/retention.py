"""Which versions keep their weights and checkpoint, and which objects may be deleted therefore."""

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from shared.errors import ContractError, IntegrityError
from shared.learning.algorithms import ALGORITHMS
from shared.messages.contracts import ObjectRef
from shared.models.memory import ITEM_BYTES
from shared.recipe.recipe import Recipe
from shared.run.commits import StoredAs
from shared.run.evaluations import GoldFigures
from shared.run.layout import (
    KEPT_BATCHES,
    NEWEST_BATCHES,
    checkpoints_folder,
    evaluation_interval,
    measured_versions,
    weights_folder,
)
from shared.run.manifest import is_manifest
from shared.run.shards import open_tensors
from shared.store import ObjectStore

log = structlog.get_logger()

Figures = Iterable[Mapping[int, float]]
"""Comparison figures of versions, for each set of evaluation settings: other pairs do not
compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    keep_last: int = 3
    keep_every: int | None = None
    keep_best: int | None = None
    max_staleness: int = 0
    evaluate_every: int | None = None
    """Every how many versions one is evaluated; None if none is."""
    gold_weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each gold reward in what `keep_best` compares (`evaluations.worth_of`)."""

    def kept(
        self,
        newest: int,
        *,
        in_use: Collection[int] = (),
        measured: Collection[int] = (),
        gold: Figures = (),
    ) -> set[int]:
        """Return the versions from 0 to ``newest`` whose objects are needed or asked for.

        Args:
            in_use: versions that workers report to use.
            measured: versions that are evaluated already.
            gold: how good they are.
        """
        last = range(newest - max(self.keep_last, 1 + self.max_staleness) + 1, newest + 1)
        every = () if self.keep_every is None else range(0, newest + 1, self.keep_every)
        due = () if self.evaluate_every is None else range(0, newest + 1, self.evaluate_every)
        best = () if self.keep_best is None else _best(gold, self.keep_best)
        wanted = {0, *last, *every, *best, *in_use, *(set(due) - set(measured))}
        return {version for version in wanted if 0 <= version <= newest}


def _best(gold: Figures, number: int) -> list[int]:
    """Return this many best versions of each set of settings, of equal ones the older; the first
    one is kept anyhow, and does not count."""
    return [
        version
        for figures in gold
        for version in heapq.nsmallest(
            number, filter(None, figures), key=lambda each: (-figures[each], each)
        )
    ]


async def kept_now(
    retention: Retention, gold: GoldFigures, newest: int, in_use: Collection[int] = ()
) -> set[int]:
    """Return the versions that are kept as far as the run's evaluations have come."""
    store, run = gold.store, gold.run
    wanted = await evaluation_interval(store, run)
    retention = replace(retention, evaluate_every=wanted or retention.evaluate_every)
    return retention.kept(
        newest,
        in_use=in_use,
        measured=await measured_versions(store, run),
        gold=[] if retention.keep_best is None else await gold.worths(),
    )


def retention_from(recipe: Recipe) -> Retention:
    """Return a recipe's retention: for an evaluated run, the best version by default."""
    keep_best = recipe.run.keep_best
    if keep_best is None and recipe.evaluation.every is not None:
        keep_best = 1
    return Retention(
        keep_last=recipe.run.keep_last,
        keep_every=recipe.run.keep_every,
        keep_best=keep_best,
        max_staleness=recipe.schedule.staleness_limit,
        evaluate_every=recipe.evaluation.every,
        gold_weights={each.name: each.weight for each in recipe.evaluation.scorers},
    )


Shards = Mapping[str, Collection[str]]
"""Keys of the shards that a manifest names, by the manifest's key."""


def deletable(
    records: Sequence[StoredAs], kept: Collection[int], shards: Shards
) -> tuple[set[str], set[str]]:
    """Return the keys of objects that no kept version names: shards, then what names them, in the
    order in which they are deleted. After an interruption, the rest is still named.

    An object that no record names stays: it may belong to the version that is being stored.
    """
    of_kept = named_by((each for each in records if each.policy.version in kept), shards)
    others = [each for each in records if each.policy.version not in kept]
    naming = {key for record in others for key in own_keys(record)}
    return named_by(others, shards) - naming - of_kept, naming - of_kept


def named_by(records: Iterable[StoredAs], shards: Shards) -> set[str]:
    """Return the keys of all objects of these versions."""
    keys = {key for record in records for key in own_keys(record)}
    return keys.union(*(shards.get(key, ()) for key in keys))


def own_keys(record: StoredAs) -> list[str]:
    """Return what a record names in its run's own folders: nothing else is ever deleted."""
    folders = tuple(f"{each}/" for each in version_folders(record.run))
    return [ref.key for ref in record.objects if ref.key.startswith(folders)]


def version_folders(run: str) -> tuple[str, str]:
    return weights_folder(run), checkpoints_folder(run)


@dataclass(slots=True)
class Manifests:
    """Reads which shards the versions of a run have, every manifest once."""

    store: ObjectStore
    _known: dict[str, frozenset[str]] = field(default_factory=dict)

    async def shards(
        self, records: Iterable[StoredAs], keys: Collection[str], kept: Collection[int]
    ) -> Shards:
        """Return the shards of the manifests that are ``keys``.

        Raises:
            IntegrityError: if a kept version's manifest cannot be read: its shards are then
                unknown.
        """
        self._known = {key: self._known[key] for key in self._known.keys() & set(keys)}
        for record in records:
            for ref in record.objects:
                if is_manifest(ref) and ref.key in keys and ref.key not in self._known:
                    self._known[ref.key] = await self._read(ref, record.policy.version in kept)
        return self._known

    async def _read(self, ref: ObjectRef, must_be_read: bool) -> frozenset[str]:
        try:
            stored = await open_tensors(self.store, ref)
        except (ContractError, IntegrityError) as error:
            if must_be_read:
                raise IntegrityError(f"nothing is deleted: {error}") from error
            log.error("manifest_unreadable", key=ref.key, error=str(error))
            return frozenset()
        return frozenset(shard.object.key for shard in stored.shards or ())


def stored_bytes(recipe: Recipe, trained_bytes: int) -> int:
    """Return the most bytes that kept versions take at once, if no evaluation has measured any."""
    retention, steps = retention_from(recipe), recipe.run.steps
    num_kept = len(retention.kept(steps)) + (retention.keep_best or 0)
    num_versions = num_kept + 1  # and the one that is being stored
    return min(num_versions, steps + 1) * version_bytes(recipe, trained_bytes)


def version_bytes(recipe: Recipe, trained_bytes: int) -> int:
    """Return the bytes of a version with its checkpoint.

    Args:
        trained_bytes: size of the trained weights in float32. A checkpoint holds AdamW's two
            moments of each of them, their average with `trainer.ema`, and the old policy of
            `algorithm.nft_decay`, which is also stored by itself. All weights are published in
                `model.dtype`; if that has half precision, a checkpoint holds them in float32.
    """
    num_copies = 1.0 + 2 + (recipe.trainer.ema is not None)
    num_copies += 2 * (recipe.algorithm.nft_decay > 0)
    if recipe.model.trained == "full":
        published = ITEM_BYTES[recipe.model.dtype] / ITEM_BYTES["float32"]
        num_copies += published if published < 1 else 0
    return round(num_copies * trained_bytes)


def trajectory_bytes(recipe: Recipe, latent_shape: Sequence[int]) -> int:
    """Return the bytes of the trajectories that are kept at a time: of the newest batches."""
    batches = min(recipe.run.steps, KEPT_BATCHES + NEWEST_BATCHES)
    return batches * batch_bytes(recipe, latent_shape)


def batch_bytes(recipe: Recipe, latent_shape: Sequence[int]) -> int:
    """Return the bytes of a batch's trajectories.

    Args:
        latent_shape: size of one sample's latents.
    """
    sampling, batch = recipe.sampling, recipe.batch
    states = sampling.window + 1
    if ALGORITHMS[recipe.algorithm.name].keeps_means:
        states += sampling.window
    sample = states * math.prod(latent_shape) * ITEM_BYTES[sampling.state_dtype]
    return batch.groups * batch.group_size * sample
