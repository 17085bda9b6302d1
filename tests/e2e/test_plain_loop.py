"""Each update of the real services is the update of a plain loop of diffusers and peft.

A version's gradient is computed back from AdamW's stored first moments, m after the batch and m0
before it: (m - b1^k m0) / (1 - b1) is the clipped gradient of its k updates, of which each weighs
b1 times the next. The plain loop begins each batch with the stored weights and moments; the weights
between two updates of a batch are stored nowhere, and are its own.
"""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.local.processes.starter import STARTER_VARIABLE
from digenrl.local.runs import find_run
from digenrl.local.store import run_store
from digenrl.planning.entries import Processes
from shared.diffusion.weights.shards import whole_tensors
from shared.process.settings import ServiceSettings
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.run.commits import commit_chain
from shared.run.shards import open_tensors
from shared.store import open_store
from tests.e2e.local_run import StartRun
from tests.e2e.plain_loop import PlainLoop, Version
from tests.e2e.plain_nft import PlainNft
from tests.paths import DEMO, RECIPES

pytestmark = [pytest.mark.run, pytest.mark.timeout(600)]

STEPS = 4
EXACT = 1e-5
"""Of the length of a gradient."""
TOLERANCE = 1e-4
"""Of the length of an update: AdamW divides by moments that may be next to nothing."""
CHANGES: dict[str, Any] = {
    "batch.group_size": 8, "schedule.fragment_size": 8, "trainer.micro_batch": 8,
    "evaluation.samples_per_prompt": 1, "run.keep_last": STEPS + 1, "trainer.max_grad_norm": 5e-3,
}  # fmt: skip
CLIPPED = {"batch.groups": 4, "algorithm.clip_range": 2e-4}
FLUID = {"schedule.mode": "fluid", "rollout.workers": 0}
SHARED = {**FLUID, "rollout.workers": 1, "trainer.shard_devices": 2}
FULL = {"model.trained": "full", "algorithm.kl_beta": 0.0, "trainer.learning_rate": 1e-5}
KEYS: dict[str, dict[str, Any]] = {
    "lent": {"schedule.tag": 1, "rollout.workers": 1},
    "one": {**FLUID, "trainer.devices": 1},
    "three": {**FLUID, "trainer.devices": 3},
    "groups": {**SHARED, "trainer.devices": 4},
    "full groups": {**SHARED, "trainer.devices": 4, **FULL},
    "group and card": {**SHARED, "trainer.devices": 2},
    "colocated": {**FLUID, "schedule.mode": "colocated", "trainer.devices": 2},
    "sequential": {"schedule.mode": "sequential", "trainer.devices": 2},
}
CASES = [
    *((each, 1, 0, "bypass") for each in ("one", "group and card")),
    *((each, 2, 0, "bypass") for each in ("colocated", "sequential")),
    ("full groups", 2, 1, "bypass"),
    *((each, 2, staleness, "nft") for each in ("lent", "three") for staleness in (0, 1)),
    *(
        (each, updates, staleness, loss)
        for each in ("lent", "three", "groups")
        for updates in (1, 2)
        for staleness in (0, 1)
        for loss in (("bypass", "decoupled") if (updates, staleness) == (2, 1) else ("bypass",))
    ),
]


def recipe_of(devices: str, updates: int, staleness: int, loss: str) -> Recipe:
    base = RECIPES / "digits-nft.toml" if loss == "nft" else DEMO
    own = {} if loss == "nft" else {**CLIPPED, "algorithm.stale_loss": loss}
    batch = {"trainer.updates": updates, "schedule.max_staleness": staleness}
    return override(load_recipe(base), {**CHANGES, **own, **KEYS[devices], **batch})


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "updates", "staleness", "loss"), CASES)
def test_each_update_is_that_of_a_plain_loop(
    start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    devices: str, updates: int, staleness: int, loss: str,
) -> None:  # fmt: skip
    recipe = recipe_of(devices, updates, staleness, loss)
    cards = ["trainer-card"] if devices == "group and card" else []
    if cards:
        monkeypatch.setenv(STARTER_VARIABLE, "off")
    versions = finished(start_run, recipe, tmp_path / "plain.json", cards)
    loop = (PlainNft if loss == "nft" else PlainLoop)(recipe, versions)
    for batch, (before, after) in enumerate(pairwise(versions)):
        plain = loop.train(batch)
        assert plain.norm > 1e-3
        assert after.record.metrics["grad_norm"] == pytest.approx(plain.norm, rel=EXACT)
        found, wanted = gradient(recipe, before, after), flat(plain.gradient)
        assert (found - wanted).norm() <= EXACT * wanted.norm(), batch
        update = flat(plain.weights) - flat(before.weights)
        assert (flat(after.weights) - flat(plain.weights)).norm() <= TOLERANCE * update.norm()
        if isinstance(loop, PlainNft):
            lag = flat(after.sampling) - flat(loop.followed(batch, plain.weights))
            assert lag.norm() <= TOLERANCE * update.norm()
            assert after.record.learned.digest != after.record.policy.weights_digest
    records = [each.record for each in versions[1:]]
    stale = {n - group.policy_version for n, each in enumerate(records) for group in each.trained}
    assert stale == set(range(staleness + 1))
    if (devices, loss, staleness) == ("lent", "nft", 0):  # else rollout may be quick enough alone
        names = [name for each in records for group in each.trained for name in group.workers]
        assert any(name.startswith("trainer") for name in names)
    members = [{share.worker for share in each.shares if share.pieces} for each in records]
    assert (max(map(len, members)) > 1) == (devices not in ("one", "lent"))


def finished(start_run: StartRun, recipe: Recipe, path: Path, cards: list[str]) -> list[Version]:
    """Run a recipe to its end, with these devices more that hold all weights; return what it has
    stored."""
    path.write_text(recipe.model_dump_json())
    run = start_run("--steps", str(STEPS), recipe=path)
    members = {*Processes.of_run(recipe).names("trainer"), *cards}
    if len(members) > 1:  # all of them take part before the run goes far
        run.wait_for(lambda view: view["phase"] == "running")
        run.post("/v1/run/pause").raise_for_status()
        for name in cards:
            run.join(name, {}, ranks=1)
        run.wait_for(lambda _: members <= {each["worker"] for each in run.get("/v1/workers")})
        run.post("/v1/run/resume").raise_for_status()
    assert run.finish()["commits"] == STEPS
    with run_store(find_run(run.folder.name, run.folder.parent)):
        return asyncio.run(stored(run.folder.name))


async def stored(run: str) -> list[Version]:
    store, versions = open_store(ServiceSettings(run=run).store), []
    for record in await commit_chain(store, run):
        names = record.learned, (record.weights, record.policy.weights_digest)
        opened = [await open_tensors(store, *each) for each in (*names, (record.checkpoint,))]
        versions.append(Version(record, *[await whole_tensors(each) for each in opened]))
    return versions


def gradient(recipe: Recipe, before: Version, after: Version) -> Tensor:
    """Return the clipped gradient between two versions, from AdamW's moments."""
    decay, now = recipe.trainer.betas[0], moments(after)
    earlier = moments(before) if before.record.policy.version else torch.zeros_like(now)
    return (now - decay**recipe.trainer.updates * earlier) / (1 - decay)


def moments(version: Version) -> Tensor:
    return flat({n: each for n, each in version.states.items() if n.startswith("exp_avg/")})


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensors[name].detach().double().flatten() for name in sorted(tensors)])
