"""Each update of the real services is the update of a plain loop of diffusers and peft."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.local.runs import find_run
from digenrl.local.store import store_of
from shared.diffusion.shards import whole_tensors
from shared.process.settings import ServiceSettings
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.run.commits import CommitRecord, commit_chain
from shared.run.shards import open_tensors
from shared.store import open_store
from tests.e2e.local_run import LocalRun, StartRun
from tests.e2e.plain_loop import PlainLoop
from tests.e2e.plain_nft import PlainNft
from tests.paths import DEMO, RECIPES

pytestmark = [pytest.mark.run, pytest.mark.timeout(600)]

NFT = RECIPES / "digits-nft.toml"
STEPS = 4
TOLERANCE = 1e-4
"""Of an update's length."""
CHANGES: dict[str, Any] = {
    "batch.groups": 4, "batch.group_size": 8, "schedule.fragment_size": 8,
    "trainer.micro_batch": 8, "evaluation.samples_per_prompt": 1,
    "algorithm.clip_range": 2e-4, "run.keep_last": STEPS + 1,
}  # fmt: skip
FLUID = {"schedule.mode": "fluid", "rollout.workers": 0, "trainer.devices": 2}
GROUPS = {
    "schedule.mode": "fluid", "rollout.workers": 1, "trainer.devices": 4,
    "trainer.shard_devices": 2,
}  # fmt: skip
COLOCATED = {**FLUID, "schedule.mode": "colocated"}
SEQUENTIAL = {"schedule.mode": "sequential", "rollout.workers": 2, "trainer.devices": 2}
AHEAD: dict[str, dict[str, Any]] = {"roles": {}, "fluid": FLUID, "groups": GROUPS}
KEYS = {**AHEAD, "colocated": COLOCATED, "sequential": SEQUENTIAL}
ALL = [
    ("colocated", 2, 0, "bypass"),
    ("sequential", 2, 0, "bypass"),
    *(
        (mode, updates, staleness, loss)
        for mode in AHEAD
        for updates in (1, 2)
        for staleness in (0, 1)
        for loss in (("bypass", "decoupled") if (updates, staleness) == (2, 1) else ("bypass",))
    ),
]


Weights = list[dict[str, Tensor]]


async def read(folder: Path) -> tuple[list[CommitRecord], Weights, Weights]:
    """Return the commit records, and of each version the weights that are trained and those that
    sample."""
    store = open_store(ServiceSettings(run=folder.name).store)
    chain = await commit_chain(store, folder.name)
    trained = [await open_tensors(store, *each.learned) for each in chain]
    sampling = [await open_tensors(store, r.weights, r.policy.weights_digest) for r in chain]
    whole = [[await whole_tensors(each) for each in sets] for sets in (trained, sampling)]
    return chain, whole[0], whole[1]


def recipe_of(mode: str, updates: int, staleness: int, loss: str) -> Recipe:
    changes = {
        **CHANGES, **KEYS[mode], "trainer.updates": updates,
        "schedule.max_staleness": staleness, "algorithm.stale_loss": loss,
    }  # fmt: skip
    return override(load_recipe(DEMO), changes)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "updates", "staleness", "loss"), ALL)
def test_each_update_is_that_of_a_plain_loop(
    start_run: StartRun, tmp_path: Path, mode: str, updates: int, staleness: int, loss: str
) -> None:
    recipe = recipe_of(mode, updates, staleness, loss)
    path = tmp_path / "plain.json"
    chain, weights, _ = finished(start_run, recipe, path)
    loop, staleness_found = PlainLoop(recipe, weights), set()
    for batch, record in enumerate(chain[1:]):
        staleness_found |= {batch - group.policy_version for group in record.trained}
        before = flat(weights[batch])
        wanted = flat(loop.train(batch, record.trained)) - before
        found = flat(weights[batch + 1]) - before
        assert wanted.norm() > 0.01
        assert float((found - wanted).norm() / wanted.norm()) <= TOLERANCE, batch
    assert staleness_found == set(range(staleness + 1))


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("mode", ["roles", "fluid"])
def test_each_update_and_what_samples_it_is_that_of_a_plain_loop_with_an_old_policy(
    start_run: StartRun, tmp_path: Path, mode: str, staleness: int
) -> None:
    changes = {
        **(FLUID if mode == "fluid" else {}), "batch.group_size": 8, "schedule.fragment_size": 8,
        "trainer.micro_batch": 8, "evaluation.samples_per_prompt": 1, "trainer.updates": 2,
        "run.keep_last": STEPS + 1, "schedule.max_staleness": staleness,
    }  # fmt: skip
    recipe = override(load_recipe(NFT), changes)
    chain, trained, sampling = finished(start_run, recipe, tmp_path / "nft.json")
    loop = PlainNft(recipe, trained, sampling)
    for batch, record in enumerate(chain[1:]):
        wanted, follows = loop.update(batch, record.trained)
        update = flat(wanted) - flat(trained[batch])
        found = flat(trained[batch + 1]) - flat(trained[batch])
        assert update.norm() > 0.01
        assert float((found - update).norm() / update.norm()) <= TOLERANCE, batch
        lag = flat(sampling[batch + 1]) - flat(follows)
        assert float(lag.norm() / update.norm()) <= TOLERANCE, batch
        assert record.learned.digest != record.policy.weights_digest


def finished(
    start_run: StartRun, recipe: Recipe, path: Path
) -> tuple[list[CommitRecord], Weights, Weights]:
    """Run a recipe to its end."""
    path.write_text(recipe.model_dump_json())
    run: LocalRun = start_run("--steps", str(STEPS), recipe=path)
    assert run.finish()["commits"] == STEPS
    with store_of(find_run(run.folder.name, run.folder.parent)):
        return asyncio.run(read(run.folder))


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensors[name].detach().double().flatten() for name in sorted(tensors)])
