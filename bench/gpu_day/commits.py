"""What a step and its commit take on this device, and until the version is published.

The adapter of SD3.5-M has a rank by which it has 1.8 GB, about as many as that of Qwen-Image.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.full_size.recipe import write_recipe
from bench.gpu_day.memory import SHAPE, TINY_SHAPE, model_folder
from bench.snapshot import commit, move
from digenrl.trace.device_profile.ladder import timed
from services.trainer.fluid.engine import FluidEngine
from services.trainer.fluid.exchange import WHOLE_BATCH, MemberRound
from services.trainer.fluid.group_exchange import GroupExchange, Membership, _serve
from services.trainer.fluid.sums import SumLayout, Term
from shared.diffusion.policy import load_policy
from shared.diffusion.training.tally import Tally
from shared.messages.contracts import Policy
from shared.messages.fluid import ExchangeSums, Share
from shared.recipe.recipe import load_recipe, override
from shared.store import ObjectStore
from shared.store.folder import FolderBackend

if TYPE_CHECKING:
    from bench.gpu_day.day import Day

RANK, TINY_RANK = 768, 4
TIMES, COMMITS = 10, 3
FLUID = {"schedule.mode": "fluid", "trainer.devices": 1, "rollout.workers": 0}
ME = "committer"


def measure(day: "Day") -> dict[str, Any]:
    """Returns medians in seconds, and the bytes that they are of."""
    shape, rank = (TINY_SHAPE, TINY_RANK) if day.tiny else (SHAPE, RANK)
    changes = {**FLUID, "model.lora": {"rank": rank, "alpha": 2.0 * rank}}
    path = write_recipe(
        day.folder / "commits", model_folder(day), shape, cpu=day.cpu, changes=changes
    )
    recipe = override(load_recipe(path), {"run.shard_bytes": 1 << 30})
    engine = FluidEngine(recipe, load_policy(recipe, {"transformer"}, trains=True))
    total = Term(
        1e-4 * torch.randn(engine.layout.size, device=engine.layout.device), Tally().as_dict()
    )
    step = _median(engine.layout.device, lambda: engine.take(0, total, engine.measured(total)))
    checked = _median(engine.layout.device, engine.checksum)
    size = sum(each.nbytes for each in engine._parameters.values())
    return {
        "adapter_gb": size / 1e9,
        "copied_gb": 3 * size / 1e9,
        "step": step,
        "checksum": checked,
        **_committed(engine, day.folder),
        "process_group_of_one": _met(engine.layout, total),
    }


def _committed(engine: FluidEngine, folder: Path) -> dict[str, float]:
    """Returns how long copies hold the device, and what committing takes."""
    device = engine.layout.device
    began = time.monotonic()
    engine.weights()
    first = time.monotonic() - began
    held = _median(device, engine.weights, before=lambda: move(engine))
    with tempfile.TemporaryDirectory(dir=folder) as stored:
        times = asyncio.run(_times(engine, ObjectStore(FolderBackend(Path(stored)))))
    return {"held_with_new_buffers": first, **times, "held": held}


async def _times(engine: FluidEngine, store: ObjectStore) -> dict[str, float]:
    found = []
    for _ in range(COMMITS):
        move(engine)
        found.append(await commit(engine, store))
        for of in ("weights", "checkpoints"):
            await store.delete_folder(f"bench/{of}")
    return {key: statistics.median(each[key] for each in found) for key in found[0]}


def _met(layout: SumLayout, total: Term) -> float:
    """Returns the seconds in which a process group of one member forms a total, NCCL on a GPU; it
    says that its calls work here, and nothing of a line between two."""
    message = ExchangeSums(
        batch=0, attempt=0, round=0, policy=Policy(version=0, weights_digest="0" * 64),
        committer=ME, shares=(Share(worker=ME, sum_number=0, pieces=()),), max_seconds=30, update=0,
    )  # fmt: skip
    round_ = MemberRound.from_message(message, "bench", ME, by_group=False)
    with tempfile.TemporaryDirectory() as folder:
        exchange = GroupExchange(ObjectStore(FolderBackend(Path(folder))), layout, "127.0.0.1")
        membership = Membership((ME,), "first", _serve(30))
        own = {WHOLE_BATCH: total}
        formed = exchange._formed(membership, round_, own)
        assert total.gradient is not None and formed.gradient is not None
        if not torch.equal(formed.gradient, total.gradient):
            raise ValueError("the total of one member is another than its sum")
        took = _median(layout.device, lambda: exchange._formed(membership, round_, own))
        membership.abort()
    return took


def _median(
    device: torch.device, work: Callable[[], object], before: Callable[[], object] | None = None
) -> float:
    """Returns the median of ten calls, after one that does not count."""
    found = []
    for _ in range(TIMES + 1):
        if before is not None:
            before()
        found.append(timed(device, work))
    return statistics.median(found[1:])
