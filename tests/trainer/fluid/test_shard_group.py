"""Two ranks are one member: they sum, exchange and step as a whole card does."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.fluid.process import as_whole
from shared.diffusion.shards import whole_tensors
from shared.messages.fluid import Piece
from shared.recipe.recipe import Recipe, override
from shared.run.shards import open_tensors
from tests.trainer.engine.ranked_program import groups_of, store_in
from tests.trainer.engine.ranks import Ranks
from tests.trainer.fluid.director import part, whole
from tests.trainer.fluid.group_program import CARD, GROUP, Seen, Task, card_of, train

SHARED: dict[str, Any] = {
    "schedule.mode": "fluid", "trainer.updates": 1, "batch.groups": 3, "trainer.sharded": True,
    "trainer.devices": 2, "trainer.max_grad_norm": 1e9,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "adapter": {"model.trained": "lora", "algorithm.kl_beta": 3.0},
    "all weights": {
        "model.trained": "full", "algorithm.kl_beta": 0.0, "trainer.ema": 0.5,
        "run.shard_bytes": 1 << 18,
    },
    "masters": {
        "model.trained": "full", "algorithm.kl_beta": 0.0, "model.dtype": "bfloat16",
    },
}  # fmt: skip


def on_a_group(ranks: Ranks, folder: Path, recipe: Recipe, task: Task, start: list[Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "recipe.json").write_text(recipe.model_dump_json())
    (folder / "task.json").write_text(task.model_dump_json())
    (folder / "start.json").write_text(json.dumps(start))
    ranks.do("group", folder)


def seen_by_the_group(folder: Path) -> list[Seen]:
    return [Seen.model_validate(each) for each in json.loads((folder / "seen.json").read_text())]


def of_three(recipe: Recipe) -> list[Piece]:
    """All rows of a batch: a piece that two ranks cannot divide evenly is among them."""
    every = range(recipe.batch.group_size)
    return [
        whole(recipe, 0),
        part(recipe, 1, range(3)),
        part(recipe, 1, range(3, len(every)), number=1),
        part(recipe, 2, every, range(0, 1)),
        part(recipe, 2, every, range(1, 3), number=1),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_sums_and_steps_as_a_card_does(
    ranks: Ranks, recipe: Recipe, tmp_path: Path, kind: str
) -> None:
    shared = override(recipe, {**SHARED, **KINDS[kind]})
    task = Task(parts={GROUP: of_three(shared)}, committer=GROUP, batches=2)
    on_a_group(ranks, tmp_path, shared, task, [])
    found = seen_by_the_group(tmp_path)

    async def alone() -> list[Seen]:
        store = store_in(tmp_path)
        device, exchange, _ = card_of(as_whole(shared), store)
        own = Task(parts={CARD: of_three(shared)}, committer=CARD, batches=2)
        return await train(device, exchange, groups_of(shared), own, CARD, store)

    for mine, theirs in zip(found, asyncio.run(alone()), strict=True):
        near = 1e-3 if kind == "masters" else 1e-5  # its passes round to bfloat16, as others do
        assert mine.norm == pytest.approx(theirs.norm, rel=near)
        assert distance(tmp_path, mine, theirs) < near


def distance(folder: Path, one: Seen, other: Seen) -> float:
    """Of two versions' weights, relative to how far they are from nothing."""

    async def read(seen: Seen) -> dict[str, torch.Tensor]:
        return await whole_tensors(await open_tensors(store_in(folder), seen.weights))

    mine, theirs = asyncio.run(read(one)), asyncio.run(read(other))
    assert mine.keys() == theirs.keys()
    away = sum(float((mine[n].double() - theirs[n].double()).square().sum()) for n in mine)
    return float((away / sum(float(t.double().square().sum()) for t in theirs.values())) ** 0.5)


CASES = [(kind, committer) for kind in KINDS for committer in (GROUP, CARD)]
QUICK = "all weights", CARD


@pytest.mark.parametrize(
    ("kind", "committer"),
    [pytest.param(*each, marks=() if each == QUICK else pytest.mark.slow) for each in CASES],
)
def test_a_card_beside_a_group_has_the_same_bits(
    ranks: Ranks, recipe: Recipe, tmp_path: Path, kind: str, committer: str
) -> None:
    shared = override(recipe, {**SHARED, **KINDS[kind]})
    first, *others = of_three(shared)
    task = Task(parts={GROUP: others, CARD: [first]}, committer=committer, batches=2)

    async def beside() -> list[Seen]:
        store = store_in(tmp_path)
        device, exchange, _ = card_of(as_whole(shared), store)
        return await train(device, exchange, groups_of(shared), task, CARD, store)

    async def both() -> list[Seen]:
        group = asyncio.to_thread(on_a_group, ranks, tmp_path, shared, task, [])
        seen, _ = await asyncio.gather(beside(), group)
        return seen

    theirs, mine = asyncio.run(both()), seen_by_the_group(tmp_path)
    assert [(each.sum_id, each.checksum, each.digest) for each in mine] == [
        (each.sum_id, each.checksum, each.digest) for each in theirs
    ]
