"""Two ranks that share all weights are killed while they store a version, and go on: to the same
objects, and so to the same bits, as ranks that nobody has disturbed."""

import asyncio
import json
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from shared.recipe.recipe import Recipe, override
from shared.run.commits import CommitRecord, commit_chain
from shared.run.garbage import delete_garbage, find_garbage
from shared.run.manifest import is_manifest
from shared.run.retention import version_folders
from shared.run.run_recipe import store_recipe
from tests.trainer.engine.ranked_program import store_in
from tests.trainer.engine.ranks import RANKS, Ranks

BATCHES = 2


class Kill(NamedTuple):
    rank: int
    part: str
    """Part of the key that is being written."""
    number: int
    """Writes of such keys that come before."""
    after: bool
    """Whether the write is done."""


KILLS = {
    "a rank between its shards of weights": Kill(1, "weights/", 7, after=True),
    "the first rank before a shard of its checkpoint": Kill(0, "checkpoints/", 9, after=False),
    "another rank in its checkpoint": Kill(1, "checkpoints/", 9, after=True),
    "before the first manifest": Kill(0, ".manifest.json", 4, after=False),
    "between both manifests": Kill(0, ".manifest.json", 4, after=True),
    "before the commit record": Kill(0, "commits/00000001", 0, after=False),
    "after the commit record": Kill(0, "commits/00000001", 0, after=True),
    "before there is any version": Kill(1, "weights/", 1, after=False),
}


@pytest.fixture(scope="module")
def two(recipe: Recipe) -> Recipe:
    return override(
        recipe,
        {
            "model.trained": "full", "algorithm.kl_beta": 0.0, "trainer.sharded": True,
            "trainer.devices": RANKS, "trainer.ema": 0.5, "run.shard_bytes": 1 << 18,
            "evaluation.every": None, "run.keep_last": 1,
        },
    )  # fmt: skip


def trained(
    ranks: Ranks, recipe: Recipe, folder: Path, batches: range, codes: tuple[int, ...] = (0, 0)
) -> list[CommitRecord]:
    (folder / "recipe.json").write_text(recipe.model_dump_json())
    (folder / "job.json").write_text(json.dumps([batches.start, batches.stop]))
    ranks.do("train", folder, codes=codes)
    return asyncio.run(commit_chain(store_in(folder), recipe.run.name))


@pytest.fixture(scope="module")
def undisturbed(
    ranks: Ranks, two: Recipe, tmp_path_factory: pytest.TempPathFactory
) -> list[CommitRecord]:
    return trained(ranks, two, tmp_path_factory.mktemp("undisturbed"), range(BATCHES))


@pytest.mark.slow
@pytest.mark.parametrize("kill", KILLS)
def test_ranks_that_are_killed_go_on_to_the_same_bits(
    ranks: Ranks, two: Recipe, undisturbed: list[CommitRecord], kill: str, tmp_path: Path
) -> None:
    assert all(is_manifest(each.weights) and is_manifest(each.checkpoint) for each in undisturbed)
    told = tmp_path / "kill.json"
    told.write_text(json.dumps(KILLS[kill]))
    codes = tuple(9 if rank == KILLS[kill].rank else 1 for rank in range(RANKS))
    chain = trained(ranks, two, tmp_path, range(BATCHES), codes)
    assert len(chain) <= BATCHES, "nobody was killed"
    told.unlink()
    left = range(max(0, len(chain) - 1), BATCHES)
    assert trained(ranks, two, tmp_path, left) == undisturbed
    assert asyncio.run(collected(tmp_path, two)) == objects_of_two_versions(undisturbed, tmp_path)


async def collected(folder: Path, recipe: Recipe) -> int:
    """The number of objects that are left of versions when gc has seen the run."""
    store, run = store_in(folder), recipe.run.name
    await store_recipe(store, recipe)
    for each in await find_garbage(store, run, now=time.time() + 1, min_age=0.0):
        await delete_garbage(store, each)
    return sum([len(await store.keys(each)) for each in version_folders(run)])


def objects_of_two_versions(chain: list[CommitRecord], folder: Path) -> int:
    """The first version and the last one are kept."""
    objects = folder / "objects"
    keys = set()
    for record in (chain[0], chain[-1]):
        for ref in (record.weights, record.checkpoint):
            manifest = json.loads((objects / ref.key).read_text())
            keys |= {ref.key, *(shard["object"]["key"] for shard in manifest["shards"])}
    return len(keys)
