"""Several processes that torchrun has started train one network: two real ranks over gloo."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from services.trainer.engine.threads import ReplicatedTraining
from shared.devices.protocols import WeightsBlob
from shared.diffusion.policy import load_policy
from shared.diffusion.tensors import unpack
from shared.recipe.recipe import Recipe, override
from tests.trainer.engine.ranked_program import groups_of, train_batch
from tests.trainer.engine.ranks import RANKS, Ranks

TOLERANCE = 1e-5
LORA = {"model.trained": "lora", "trainer.sharded": False}
KINDS = {
    "replicated": LORA,
    "sharded": {**LORA, "trainer.sharded": True},
    "full, sharded": {"model.trained": "full", "algorithm.kl_beta": 0.0, "trainer.sharded": True},
}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def one(kind: str, recipe: Recipe) -> Recipe:
    """The recipe of one rank."""
    alone = {**KINDS[kind], "trainer.sharded": False, "trainer.max_grad_norm": 1e9}
    return override(recipe, alone)


@pytest.fixture(scope="module")
def two(kind: str, one: Recipe) -> Recipe:
    return override(one, {**KINDS[kind], "trainer.ranks": RANKS})


@dataclass(frozen=True)
class Versions:
    """0, 1, ...: what was there before the first batch, and after each."""

    weights: list[WeightsBlob]

    def moments(self, version: int) -> dict[str, Tensor]:
        """After the first batch: its gradient, times a constant."""
        tensors = unpack(self.weights[version].checkpoint)
        return {name: t for name, t in tensors.items() if name.startswith("exp_avg/")}


def on_two(
    ranks: Ranks,
    recipe: Recipe,
    folder: Path,
    batches: tuple[int, int],
    start: WeightsBlob | None = None,
) -> Versions:
    folder.mkdir()
    (folder / "recipe.json").write_text(recipe.model_dump_json())
    (folder / "job.json").write_text(json.dumps(batches))
    if start is not None:
        (folder / "adapter").write_bytes(start.adapter)
        (folder / "checkpoint").write_bytes(start.checkpoint)
    ranks.do("train", folder)
    numbers = (0, *range(batches[0] + 1, batches[1] + 1))
    return Versions([stored(folder, number) for number in numbers])


def stored(folder: Path, version: int) -> WeightsBlob:
    files = (folder / f"{version}.{name}" for name in ("adapter", "checkpoint"))
    return WeightsBlob("", *(file.read_bytes() for file in files))


def on_one(recipe: Recipe, batches: tuple[int, int], start: WeightsBlob | None = None) -> Versions:
    training = ReplicatedTraining(recipe, [load_policy(recipe, {"transformer"})])
    groups = groups_of(recipe)

    async def train() -> list[WeightsBlob]:
        if start is not None:
            await training.restore(start.adapter, start.checkpoint)
        begun = await training.weights()
        return [begun, *[await train_batch(training, groups, batch) for batch in range(*batches)]]

    return Versions(asyncio.run(train()))


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Relative, over all tensors as one vector."""
    assert found.keys() == wanted.keys() and wanted
    difference = sum(float(((found[n] - wanted[n]).double() ** 2).sum()) for n in wanted)
    return float((difference / sum(float((w.double() ** 2).sum()) for w in wanted.values())) ** 0.5)


@pytest.fixture(scope="module")
def trained(ranks: Ranks, two: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return on_two(ranks, two, tmp_path_factory.mktemp("ranks") / "first", (0, 2))


def test_two_ranks_have_the_gradient_of_one(one: Recipe, trained: Versions) -> None:
    alone = on_one(one, (0, 1))
    assert distance(trained.moments(1), alone.moments(1)) <= TOLERANCE
    assert distance(unpack(trained.weights[0].adapter), unpack(alone.weights[0].adapter)) == 0


def test_one_rank_goes_on_where_two_were_and_two_where_one_was(
    ranks: Ranks, one: Recipe, two: Recipe, trained: Versions, tmp_path: Path
) -> None:
    before = trained.weights[1]
    alone = on_one(one, (1, 2), before)
    assert alone.weights[0].checkpoint == before.checkpoint, "the optimizer state was changed"
    assert alone.weights[0].adapter == before.adapter
    assert distance(alone.moments(1), trained.moments(2)) <= TOLERANCE

    back = on_two(ranks, two, tmp_path / "back", (2, 3), alone.weights[1])
    assert back.weights[0].checkpoint == alone.weights[1].checkpoint
    assert back.weights[0].adapter == alone.weights[1].adapter
    moved = distance(unpack(back.weights[1].adapter), unpack(back.weights[0].adapter))
    assert moved > 0


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


@pytest.mark.parametrize("lost", range(RANKS))
@pytest.mark.parametrize("where", ["train", pytest.param("step", marks=pytest.mark.slow)])
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
