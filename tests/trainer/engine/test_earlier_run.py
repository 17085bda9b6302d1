"""A run that commit 30368cb made (`run-30368cb`) goes on: its recipe, its chain of commits, its
weights, its checkpoint with averages, its evaluations and the usage of its devices are read."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from digenrl.evaluation.run import weights_to_use
from services.scheduler.core.usage import BatchUsage
from services.trainer.engine.trainer_engine import TrainerEngine
from services.trainer.versions import NewVersion, Versions
from shared.bus.bus import Bus
from shared.diffusion.weights import weights_digest
from shared.errors import ContractError
from shared.process.worker import Worker, WorkerContext
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.run.commits import CommitRecord, commit_chain, newest_commit, record_digest
from shared.run.evaluations import GoldFigures
from shared.run.layout import commit_key, recipe_key, usage_key
from shared.run.run_recipe import read_recipe, store_recipe
from shared.run.shards import open_tensors
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests.paths import ROOT
from tests.trainer.batches import make_batch, train_group

MADE = Path(__file__).parent / "run-30368cb"
RUN = "tiny"
DIGEST = "7955dd1a9b813a1b4a8eac7bfca86abfdfed68179cfce5150e19f9c4d41f4fef"
"""Digest of its newest weights, as that commit computed it."""


@pytest.fixture
async def store(tmp_path: Path) -> ObjectStore:
    """A copy of the run, whose recipe names this clone as it named the one that it was made in."""
    shutil.copytree(MADE, tmp_path / "objects")
    objects = ObjectStore(FolderBackend(tmp_path / "objects"))
    stored = await objects.read(recipe_key(RUN))
    assert stored is not None
    here = stored.replace(b'"/digenrl/', f'"{ROOT}/'.encode())
    await objects.write(recipe_key(RUN), here)
    return objects


@pytest.fixture
async def versions(store: ObjectStore, nats_url: str) -> AsyncIterator[Versions]:
    async with Bus.connect(nats_url, run=RUN, name="test") as bus:
        worker = Worker("trainer", "trainer", "waiting_for_rollout")
        worker.address = "trainer-0"
        yield Versions(WorkerContext(bus, store, worker))


async def restored(store: ObjectStore, recipe: Recipe, record: CommitRecord) -> TrainerEngine:
    engine = TrainerEngine(recipe)
    weights = await open_tensors(store, record.weights, record.policy.weights_digest)
    await engine.restore(weights, await open_tensors(store, record.checkpoint))
    return engine


async def test_it_goes_on_from_its_newest_version(store: ObjectStore, versions: Versions) -> None:
    recipe = await store_recipe(
        store, override(load_recipe(MADE / "recipe.toml"), {"run.steps": 3})
    )
    before = await commit_chain(store, RUN)
    newest = await newest_commit(store, RUN)
    assert newest is not None and newest == before[2]

    engine = await restored(store, recipe, newest)
    assert engine.weights_digest() == newest.policy.weights_digest == DIGEST
    engine.begin()
    for group in make_batch(recipe)[: recipe.batch.groups]:
        train_group(engine, group.cut([4]), group.conditions, group.advantages)
    metrics = engine.step(2)
    made = await versions.commit(NewVersion(engine.weights(), newest, metrics=metrics))

    chain = await commit_chain(store, RUN)
    assert chain == [*before, made]
    resumed = await restored(store, recipe, made)
    assert resumed.weights_digest() == engine.weights_digest() != DIGEST


async def test_what_it_has_stored_is_read(store: ObjectStore) -> None:
    recipe, chain = await read_recipe(store, RUN), await commit_chain(store, RUN)
    assert recipe is not None
    assert (recipe.trainer.deterministic, recipe.trainer.ema_warmup) == (True, False)
    averages = await weights_to_use(store, recipe, chain[2])
    assert averages.keys() and weights_digest(averages) != DIGEST
    [figures] = await GoldFigures(store, RUN, {}).read()
    assert figures == {2: 0.55}
    usage = BatchUsage.model_validate_json(await store.read(usage_key(RUN, 1)) or b"")
    assert usage.batch == 1


async def test_the_chain_is_of_stored_bytes(store: ObjectStore) -> None:
    """However a record of an earlier release would be encoded today."""
    key = commit_key(RUN, 1)
    stored = await store.read(key)
    assert stored is not None
    await store.write(key, stored + b"\n")
    with pytest.raises(ContractError, match="broken at version 2"):
        await commit_chain(store, RUN)
    second = await store.read(commit_key(RUN, 2))
    assert second is not None
    old, new = (record_digest(each).encode() for each in (stored, stored + b"\n"))
    await store.write(commit_key(RUN, 2), second.replace(old, new))
    assert len(await commit_chain(store, RUN)) == 3
