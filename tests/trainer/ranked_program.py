"""What torchrun starts in the tests of ranks: the trainer's own ranks, with batches from here.

    python -m torch.distributed.run ... -m tests.trainer.ranked_program FOLDER

The first rank reads ``recipe.json`` and, if they are there, ``adapter`` and ``checkpoint``, trains
``job.json``'s batches, and writes what it has before and after each, and the exchanges that it saw.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.trainer.engine import TrainerEngine
from services.trainer.follower import follow
from services.trainer.ranked import RankedTraining, start_ranks
from services.trainer.world import this_rank
from shared.engines import GroupData, Training, Weights
from shared.pieces import Cut, cuts
from shared.recipe import Recipe, load_recipe
from tests.trainer.batches import make_batch


class Exchanges(TorchDispatchMode):
    """Counts reductions among ranks in this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func.namespace == "c10d" and "reduce" in func.__name__
        return func(*args, **(kwargs or {}))


def groups_of(recipe: Recipe) -> list[GroupData]:
    return [
        GroupData(
            trajectories=tuple(group.cut((2, 2))),
            conditions=group.conditions,
            advantages=tuple(group.advantages),
            staleness=int(number == 2),
        )
        for number, group in enumerate(make_batch(recipe, off_policy=3e-3))
    ]


async def train_batch(training: Training, groups: list[GroupData], batch: int) -> Weights:
    """Pieces to the devices in turn, several at a time."""
    training.begin()
    for number, group in enumerate(groups):
        devices = training.devices
        pieces = cuts(4, len(devices), 3, is_last=number == len(groups) - 1)
        queues = [pieces[index :: len(devices)] for index in range(len(devices))]

        async def drain(index: int, group: GroupData, queue: list[Cut]) -> None:
            for cut in queue:
                await training.devices[index].accumulate(group, cut)

        await asyncio.gather(*(drain(i, group, queue) for i, queue in enumerate(queues)))
    metrics = await training.step(batch)
    assert metrics["skipped_not_finite"] == 0
    return await training.weights()


async def work(folder: Path, recipe: Recipe, training: RankedTraining) -> None:
    if (folder / "adapter").is_file():
        parts = [(folder / name).read_bytes() for name in ("adapter", "checkpoint")]
        await training.restore(*parts)
    save(folder, 0, await training.weights())
    groups = groups_of(recipe)
    first, last = json.loads((folder / "job.json").read_text())
    for batch in range(first, last):
        save(folder, batch + 1, await train_batch(training, groups, batch))


def save(folder: Path, version: int, weights: Weights) -> None:
    (folder / f"{version}.adapter").write_bytes(weights.adapter)
    (folder / f"{version}.checkpoint").write_bytes(weights.checkpoint)


def exchanges_of_a_batch(engine: TrainerEngine, groups: list[GroupData]) -> list[int]:
    """Of its passes, and of its step; every rank trains the same."""
    counts = []
    engine.begin()
    with Exchanges() as passes:
        for group in groups:
            engine.train(engine.read(group))
    counts.append(passes.count)
    with Exchanges() as step:
        engine.step(0)
    return [*counts, step.count]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    if this_rank():
        follow()
        return
    recipe = load_recipe(folder / "recipe.json")
    training = start_ranks(recipe)
    asyncio.run(work(folder, recipe, training))
    training.end()


def count(folder: Path) -> None:
    from services.trainer.follower import load_engine
    from services.trainer.links import join

    torch.set_num_threads(1)
    join()
    recipe = load_recipe(folder / "recipe.json")
    counts = exchanges_of_a_batch(load_engine(recipe), groups_of(recipe))
    (folder / f"exchanges-{this_rank()}.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1])) if sys.argv[2] == "train" else count(Path(sys.argv[1]))
