"""Two ranks are one member: they sum, exchange and step as a whole card does."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.fluid.process import as_whole
from shared.diffusion.generation import Generator, LocalGenerator
from shared.diffusion.sampling.tensors import unpack
from shared.diffusion.weights.shards import whole_tensors
from shared.messages.contracts import ObjectRef
from shared.messages.fluid import Piece
from shared.recipe.recipe import Recipe, override
from shared.run.shards import open_tensors
from tests import examples
from tests.trainer.batches import groups_of
from tests.trainer.fluid.director import part, whole
from tests.trainer.fluid.group_program import (
    CARD,
    GROUP,
    Seen,
    Task,
    card_of,
    restore,
    store_in,
    train,
)
from tests.trainer.fluid.ranks import RANKS, Ranks

SHARED: dict[str, Any] = {
    "schedule.mode": "fluid", "trainer.updates": 1, "batch.groups": 3,
    "trainer.shard_devices": RANKS, "trainer.devices": RANKS, "trainer.max_grad_norm": 1e9,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "adapter": {"model.trained": "lora", "algorithm.kl_beta": 3.0},
    "shared noise": {"model.trained": "lora", "sampling.shared_noise": True},
    "all weights": {
        "model.trained": "full", "algorithm.kl_beta": 0.0, "trainer.ema": 0.5,
        "run.shard_bytes": 1 << 18,
    },
    "masters": {
        "model.trained": "full", "algorithm.kl_beta": 0.0, "model.dtype": "bfloat16",
        "model.height": 32, "model.width": 32,
    },
}  # fmt: skip


@pytest.fixture
def shared_as(recipe: Recipe, wan: Path) -> Callable[[str], Recipe]:
    def shared(kind: str) -> Recipe:
        changes = {**SHARED, **KINDS[kind]}
        if kind == "masters":
            changes["model.folder"] = str(wan)
        return override(recipe, changes)

    return shared


def on_a_group(
    ranks: Ranks, folder: Path, recipe: Recipe, task: Task, codes: tuple[int, int] = (0, 0)
) -> list[Seen]:
    """Train on two ranks; nothing is returned if one of them ends with another code than 0."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.json").write_text(recipe.model_dump_json())
    (folder / "task.json").write_text(task.model_dump_json())
    ranks.do("group", folder, codes=codes)
    if any(codes):
        return []
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


async def on_a_card(folder: Path, recipe: Recipe, task: Task) -> list[Seen]:
    """Train on a member with all weights, in this process."""
    store = store_in(folder)
    device, exchange, loaded = card_of(as_whole(recipe), store)
    await restore(device, task, store)
    generator = LocalGenerator(Generator(as_whole(recipe), loaded))
    return await train(device, exchange, groups_of(recipe), task, CARD, store, generator=generator)


GENERATED = [examples.task(first_sample=first, num_samples=n) for first, n in ((0, 3), (3, 1))]
"""Fragments that two ranks cannot divide evenly, or not at all."""


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "all weights" else pytest.mark.slow) for k in KINDS]
)
def test_a_group_generates_as_a_card_does_before_and_after_a_step(
    ranks: Ranks, shared_as: Callable[[str], Recipe], tmp_path: Path, kind: str
) -> None:
    shared = override(shared_as(kind), {"schedule.mode": "fluid", "rollout.workers": 0})
    task = Task(parts={GROUP: of_three(shared)}, committer=GROUP, batches=2, fragments=GENERATED)
    found = on_a_group(ranks, tmp_path, shared, task)
    own = task.model_copy(update={"parts": {CARD: of_three(shared)}, "committer": CARD})
    for mine, theirs in zip(found, asyncio.run(on_a_card(tmp_path, shared, own)), strict=True):
        for one, other in zip(mine.generated, theirs.generated, strict=True):
            check_samples(kind, *(opened(tmp_path, each) for each in (one, other)))


def opened(folder: Path, made: tuple[ObjectRef, ObjectRef]) -> dict[str, torch.Tensor]:
    async def read(ref: ObjectRef) -> bytes:
        return await store_in(folder).get(ref)

    trajectory, media = (unpack(asyncio.run(read(each))) for each in made)
    return trajectory | media


def check_samples(
    kind: str, mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]
) -> None:
    assert mine.keys() == theirs.keys()
    near = 0.03 if kind == "masters" else 1e-4
    for name, tensor in theirs.items():
        assert mine[name].shape == tensor.shape
        away = (mine[name].double() - tensor.double()).norm() / (1e-9 + tensor.double().norm())
        assert float(away) < near, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_sums_and_steps_as_a_card_does(
    ranks: Ranks, shared_as: Callable[[str], Recipe], tmp_path: Path, kind: str
) -> None:
    shared = shared_as(kind)
    task = Task(parts={GROUP: of_three(shared)}, committer=GROUP, batches=2)
    found = on_a_group(ranks, tmp_path, shared, task)
    own = Task(parts={CARD: of_three(shared)}, committer=CARD, batches=2)
    for mine, theirs in zip(found, asyncio.run(on_a_card(tmp_path, shared, own)), strict=True):
        check_near(kind, tmp_path, mine, theirs)


def check_near(kind: str, folder: Path, mine: Seen, theirs: Seen) -> None:
    near = 4e-3 if kind == "masters" else 1e-5  # its passes and its weights round to bfloat16
    assert mine.norm == pytest.approx(theirs.norm, rel=near)
    assert distance(folder, mine, theirs) < near


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
    ranks: Ranks, shared_as: Callable[[str], Recipe], tmp_path: Path, kind: str, committer: str
) -> None:
    shared = shared_as(kind)
    first, *others = of_three(shared)
    task = Task(parts={GROUP: others, CARD: [first]}, committer=committer, batches=2)

    async def both() -> tuple[list[Seen], list[Seen]]:
        group = asyncio.to_thread(on_a_group, ranks, tmp_path, shared, task)
        return await asyncio.gather(on_a_card(tmp_path, shared, task), group)

    theirs, mine = asyncio.run(both())
    assert [(each.sum_id, each.checksum, each.digest) for each in mine] == [
        (each.sum_id, each.checksum, each.digest) for each in theirs
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_card_goes_on_where_a_group_was_and_a_group_where_a_card_was(
    ranks: Ranks, shared_as: Callable[[str], Recipe], tmp_path: Path, kind: str
) -> None:
    shared = shared_as(kind)
    of_group = Task(parts={GROUP: of_three(shared)}, committer=GROUP)
    of_card = Task(parts={CARD: of_three(shared)}, committer=CARD)
    [first] = on_a_group(ranks, tmp_path, shared, of_group)

    def after(task: Task, seen: Seen, batch: int) -> Task:
        return task.model_copy(update={"start": seen.version, "first": batch})

    [second] = asyncio.run(on_a_card(tmp_path, shared, after(of_card, first, 1)))
    [same] = on_a_group(ranks, tmp_path, shared, after(of_group, first, 1))
    check_near(kind, tmp_path, second, same)
    [third] = on_a_group(ranks, tmp_path, shared, after(of_group, second, 2))
    [last] = asyncio.run(on_a_card(tmp_path, shared, after(of_card, second, 2)))
    check_near(kind, tmp_path, third, last)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapter", "all weights"])
def test_what_lies_whole_on_every_rank_is_exchanged_once_per_update(
    ranks: Ranks, shared_as: Callable[[str], Recipe], tmp_path: Path, kind: str
) -> None:
    (tmp_path / "recipe.json").write_text(shared_as(kind).model_dump_json())
    ranks.do("count", tmp_path)
    counts = [json.loads((tmp_path / f"exchanges-{n}.json").read_text()) for n in range(RANKS)]
    assert counts[0] == counts[1]
    in_passes, in_sum = counts[0]
    if kind == "adapter":
        assert (in_passes, in_sum) == (0, 1)
    else:
        assert in_passes > 0 == in_sum  # whole gradients would not fit


@pytest.mark.slow
@pytest.mark.parametrize("lost", range(RANKS))
@pytest.mark.parametrize("where", ["train", "step"])
def test_when_one_rank_has_no_memory_the_first_says_why_and_nobody_waits_for_it(
    ranks: Ranks, shared_as: Callable[[str], Recipe], tmp_path: Path, where: str, lost: int
) -> None:
    shared = shared_as("adapter")
    (tmp_path / "job.json").write_text(json.dumps([where, lost]))
    (tmp_path / "recipe.json").write_text(shared.model_dump_json())
    task = Task(parts={GROUP: of_three(shared)}, committer=GROUP)
    (tmp_path / "task.json").write_text(task.model_dump_json())
    ranks.do("lack", tmp_path, codes=(0, 1))  # without the first, the second ends as well
    reason = (tmp_path / "lost").read_text()
    assert f"(on rank {lost})" in reason
    wanted = "Tried to allocate 20.00 GiB" if where == "train" else "the optimizer step"
    assert wanted in reason and "train" in reason


KILLS = {
    "another rank between its shards of weights": (1, "weights/", 1, True),
    "the first rank before a shard of its checkpoint": (0, "checkpoints/", 2, False),
    "before the first manifest": (0, ".manifest.json", 0, False),
    "between both manifests": (0, ".manifest.json", 0, True),
}
"""Rank, part of the key that is written, writes of such keys before, and whether it is done."""


@pytest.mark.slow
@pytest.mark.parametrize("kill", KILLS)
def test_a_group_that_dies_while_it_stores_a_version_goes_on_to_the_same_objects(
    ranks: Ranks, shared_as: Callable[[str], Recipe], tmp_path: Path, kill: str
) -> None:
    shared = shared_as("all weights")
    task = Task(parts={GROUP: of_three(shared)}, committer=GROUP, batches=2)
    _, undisturbed = on_a_group(ranks, tmp_path / "undisturbed", shared, task)
    folder = tmp_path / "killed"
    [first] = on_a_group(ranks, folder, shared, task.model_copy(update={"batches": 1}))
    rank, *where = KILLS[kill]
    (folder / "kill.json").write_text(json.dumps([rank, *where]))
    task = task.model_copy(update={"start": first.version, "first": 1, "batches": 1})
    codes = (9, 1) if rank == 0 else (1, 9)
    on_a_group(ranks, folder, shared, task, codes)
    (folder / "kill.json").unlink()
    assert on_a_group(ranks, folder, shared, task) == [undisturbed]
