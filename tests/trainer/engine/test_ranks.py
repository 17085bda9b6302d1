"""Several processes train one network: two real ranks over gloo."""

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.trainer.engine.threads import ReplicatedTraining
from shared.diffusion.policy import load_policy
from shared.diffusion.shards import whole_tensors
from shared.messages.contracts import ObjectRef
from shared.recipe.recipe import Recipe, override
from shared.run.commits import CommitRecord
from shared.run.layout import commit_key
from shared.run.shards import open_tensors
from tests.trainer.engine.ranked_program import VERSIONS, store_in, train_batches
from tests.trainer.engine.ranks import RANKS, Ranks

TOLERANCE = 1e-5
LORA = {
    "model.trained": "lora",
    "trainer.sharded": False,
    "algorithm.advantage_std": "batch",  # what does not depend on advantages is a sum of its own
    "algorithm.kl_beta": 3.0,
}
FULL: dict[str, object] = {
    "model.trained": "full",
    "algorithm.kl_beta": 0.0,
    "trainer.sharded": True,
}
SHARD_BYTES = 1 << 18
KINDS = {
    "replicated": LORA,
    "sharded": {**LORA, "trainer.sharded": True},
    "full, sharded": {**FULL, "trainer.ema": 0.5, "run.shard_bytes": SHARD_BYTES},
}


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def one(kind: str, recipe: Recipe) -> Recipe:
    """The recipe of one rank."""
    alone = {**KINDS[kind], "trainer.sharded": False, "trainer.max_grad_norm": 1e9}
    return override(recipe, alone)


@pytest.fixture(scope="module")
def two(kind: str, one: Recipe) -> Recipe:
    return override(one, {"trainer.devices": RANKS, "trainer.hosts": RANKS, **KINDS[kind]})


@dataclass(frozen=True)
class Versions:
    """What was there before the first batch, and after each."""

    folder: Path
    records: list[CommitRecord]

    def weights(self, version: int) -> dict[str, Tensor]:
        record = self.records[version]
        return self._read(record.weights, record.policy.weights_digest)

    def checkpoint(self, version: int) -> dict[str, Tensor]:
        record = self.records[version]
        return self._read(record.checkpoint, record.policy.weights_digest)

    def moments(self, version: int) -> dict[str, Tensor]:
        """Return the first moments; after the first batch the gradient times a constant."""
        tensors = self.checkpoint(version)
        return {name: t for name, t in tensors.items() if name.startswith("exp_avg/")}

    def _read(self, ref: ObjectRef, digest: str) -> dict[str, Tensor]:
        async def read() -> dict[str, Tensor]:
            return await whole_tensors(await open_tensors(store_in(self.folder), ref, digest))

        return asyncio.run(read())


def on_two(ranks: Ranks, recipe: Recipe, folder: Path, batches: tuple[int, int]) -> Versions:
    """Train on two ranks, from the newest version in the folder's store."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.json").write_text(recipe.model_dump_json())
    (folder / "job.json").write_text(json.dumps(batches))
    ranks.do("train", folder)
    return Versions(folder, VERSIONS.validate_json((folder / "versions.json").read_bytes()))


def on_one(recipe: Recipe, folder: Path, batches: tuple[int, int]) -> Versions:
    """Train in this process, from the newest version in the folder's store."""
    training = ReplicatedTraining(recipe, [load_policy(recipe, {"transformer"})])
    work = train_batches(training, store_in(folder), recipe, range(*batches))
    return Versions(folder, asyncio.run(work))


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Relative, over all tensors as one vector."""
    assert found.keys() == wanted.keys() and wanted
    difference = sum(float(((found[n] - wanted[n]).double() ** 2).sum()) for n in wanted)
    return float((difference / sum(float((w.double() ** 2).sum()) for w in wanted.values())) ** 0.5)


@pytest.fixture(scope="module")
def trained(ranks: Ranks, two: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return on_two(ranks, two, tmp_path_factory.mktemp("ranks") / "first", (0, 2))


def test_two_ranks_have_the_gradient_of_one(one: Recipe, trained: Versions, tmp_path: Path) -> None:
    alone = on_one(one, tmp_path, (0, 1))
    assert distance(trained.moments(1), alone.moments(1)) <= TOLERANCE
    assert distance(trained.weights(0), alone.weights(0)) == 0
    assert trained.records[0].policy == alone.records[0].policy


@pytest.mark.slow
def test_two_ranks_train_merged_rows_as_one_does(
    ranks: Ranks, kind: str, one: Recipe, two: Recipe, tmp_path: Path
) -> None:
    """One group begins at two states: ranks that share weights have samples of one of them each,
    and take the passes of both."""
    shared = {"sampling.shared_noise": True}
    together = on_two(ranks, override(two, shared), tmp_path / "two", (0, 1))
    alone = on_one(override(one, shared), tmp_path / "one", (0, 1))
    assert distance(together.moments(1), alone.moments(1)) <= TOLERANCE


@pytest.mark.slow
def test_two_ranks_clip_later_updates_around_the_start_of_the_batch_as_one_does(
    ranks: Ranks, kind: str, one: Recipe, two: Recipe, tmp_path: Path
) -> None:
    if kind.startswith("full"):
        pytest.skip("refused: an adapter is kept, not all weights")
    changes: dict[str, object] = {
        "trainer.updates": 3, "algorithm.stale_loss": "decoupled", "algorithm.clip_range": 1e-5,
    }  # fmt: skip
    alone = on_one(override(one, changes), tmp_path / "one", (0, 2))
    together = on_two(ranks, override(two, changes), tmp_path / "two", (0, 2))
    assert distance(together.weights(2), alone.weights(2)) <= TOLERANCE
    assert distance(together.moments(2), alone.moments(2)) <= TOLERANCE
    bypass = on_one(
        override(one, {**changes, "algorithm.stale_loss": "bypass"}), tmp_path / "other", (0, 2)
    )
    assert distance(bypass.moments(2), alone.moments(2)) > 100 * TOLERANCE


@pytest.mark.slow
def test_one_rank_goes_on_where_two_were_and_two_where_one_was(
    ranks: Ranks, one: Recipe, two: Recipe, trained: Versions, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained.folder, folder)
    (folder / "objects" / commit_key(one.run.name, 2)).unlink()
    alone = on_one(one, folder, (1, 2))
    assert equal(alone.checkpoint(0), trained.checkpoint(1)), "the optimizer state was changed"
    assert equal(alone.weights(0), trained.weights(1))
    assert distance(alone.moments(1), trained.moments(2)) <= TOLERANCE

    back = on_two(ranks, two, folder, (2, 3))
    assert equal(back.checkpoint(0), alone.checkpoint(1))
    assert equal(back.weights(0), alone.weights(1))
    moved = distance(back.weights(1), back.weights(0))
    assert moved > 0
    same = on_two(ranks, two, folder, (3, 3)).records[0]
    assert same == back.records[1], "the same ranks store what they have restored as other objects"


@pytest.mark.slow
def test_what_lies_whole_on_every_rank_is_exchanged_once_per_batch(
    ranks: Ranks, kind: str, two: Recipe, tmp_path: Path
) -> None:
    (tmp_path / "recipe.json").write_text(two.model_dump_json())
    ranks.do("count", tmp_path)
    counts = [json.loads((tmp_path / f"exchanges-{n}.json").read_text()) for n in range(RANKS)]
    assert counts[0] == counts[1]
    in_passes, in_step = counts[0]
    if kind == "full, sharded":
        assert in_passes > 0  # whole gradients would not fit
    else:
        assert (in_passes, in_step) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("lost", range(RANKS))
@pytest.mark.parametrize("where", ["train", "step"])
def test_when_one_rank_has_no_memory_the_first_says_why_and_nobody_waits_for_it(
    ranks: Ranks, kind: str, two: Recipe, tmp_path: Path, where: str, lost: int
) -> None:
    if kind != "sharded":
        pytest.skip("ranks with all weights train on their own")
    (tmp_path / "recipe.json").write_text(two.model_dump_json())
    (tmp_path / "job.json").write_text(json.dumps([where, lost]))
    ranks.do("lack", tmp_path, codes=(0, 1))  # without the first, the second ends as well
    reason = (tmp_path / "lost").read_text()
    assert f"(on rank {lost})" in reason
    wanted = "Tried to allocate 20.00 GiB" if where == "train" else "the optimizer step"
    assert wanted in reason and "train" in reason
