"""How long a commit holds the trainer's device for its copy, and how long until it is published.

    python -m bench.snapshot [--gib .15] [--times 10] [--ema]

A real `FluidEngine` on the digits' network, with an adapter of `--gib` GiB, copies, digests and
stores versions in a folder, fsync included. Prints one line of JSON: medians in seconds, per GB of
adapter and as they are. Also runs on releases whose commit did all of that with the device held.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from services.trainer.engine.storing import store_states, store_weights
from services.trainer.fluid.engine import FluidEngine
from shared.diffusion.policy import load_policy
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.store import ObjectStore
from shared.store.folder import FolderBackend

RUN = "bench"


def engine_of(gib: float, *, ema: bool) -> tuple[FluidEngine, float]:
    """Returns an engine with an optimizer state, and the bytes of its adapter."""
    recipe = load_recipe(Path("bench/learning/digits.toml"))
    one = _bytes(_engine(_with_rank(recipe, 8, ema=ema))) / 8
    engine = _engine(_with_rank(recipe, max(1, round(gib * 2**30 / one)), ema=ema))
    engine.begin()
    engine.step(0)  # of zeros: the optimizer has its moments
    return engine, _bytes(engine)


def _engine(recipe: Recipe) -> FluidEngine:
    return FluidEngine(recipe, load_policy(recipe, {"transformer"}, trains=True))


def _with_rank(recipe: Recipe, rank: int, *, ema: bool) -> Recipe:
    lora = {"rank": rank, "alpha": 2.0 * rank}
    changes: dict[str, Any] = {"model.lora": lora, "trainer.ema": 0.9 if ema else None}
    return override(recipe, {**changes, "run.shard_bytes": 1 << 30})


def _bytes(engine: FluidEngine) -> int:
    return sum(each.numel() * each.element_size() for each in engine._parameters.values())


@torch.no_grad()
def move(engine: FluidEngine) -> None:
    """Changes the weights, as a step does."""
    for each in engine._parameters.values():
        each.add_(1e-6)


async def commit(engine: FluidEngine, store: ObjectStore) -> dict[str, float]:
    """Copies and stores one version; returns the seconds that the device was held, and those until
    its weights were stored."""
    began = time.monotonic()
    snapshot = await asyncio.to_thread(engine.weights)
    held = time.monotonic()
    await store_weights(store, RUN, snapshot)
    published = time.monotonic()
    await store_states(store, RUN, snapshot)
    return {
        "held": held - began,
        "published": published - began,
        "checkpointed": time.monotonic() - began,
    }


async def measure(engine: FluidEngine, folder: Path, *, times: int) -> dict[str, float]:
    """Returns the median of each figure; the first version, whose buffers are new, is left out."""
    store, found = ObjectStore(FolderBackend(folder)), []
    for _ in range(times + 1):
        move(engine)
        found.append(await commit(engine, store))
        for of in ("weights", "checkpoints"):
            await store.delete_folder(f"{RUN}/{of}")
    return {key: statistics.median(each[key] for each in found[1:]) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=0.15)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--ema", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    engine, size = engine_of(given.gib, ema=given.ema)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(engine, Path(folder), times=given.times))
    copied = size * (3 + given.ema)
    line = {
        "adapter_gb": size / 1e9,
        "copied_gb": copied / 1e9,
        "held_s_per_gb_copied": found["held"] / copied * 1e9,
        "held_s_per_gb_of_adapter": found["held"] / size * 1e9,
        **found,
    }
    print(json.dumps({key: round(value, 4) for key, value in line.items()}))  # noqa: T201


if __name__ == "__main__":
    main()
