"""Trains SD3.5-M with random weights for four steps through all services, on the GPUs of this host.

Fluid devices generate and train what there is; where two of their processes share the first GPU,
one is killed after a step. Otherwise one GPU does both by turns; of several, the first half trains
and is lent, and the others generate.
"""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.full_size.recipe import Shape, write_recipe
from bench.full_size.run import NAME, figures, run_recipe
from bench.full_size.watch import Kill
from bench.gpu_day.memory import model_folder
from digenrl.local.processes.gpus import VISIBLE, visible_gpus

if TYPE_CHECKING:
    from bench.gpu_day.day import Day

SHAPE = Shape(side=512, steps=6, groups=4, group_size=8, batches=4)
TINY_SHAPE = Shape(side=32, steps=3, groups=2, group_size=4, batches=2)
MOST_GPUS = 8
LIMIT_S = 12 * 60
KILLED = "trainer-1"


def measure(day: "Day", how: str) -> dict[str, Any]:
    """Returns what the run took, and where it ran. ``how``: "fluid", "shared" or "lent"."""
    shape = TINY_SHAPE if day.tiny else SHAPE
    visible = () if day.cpu else visible_gpus()
    if how == "shared":
        visible = visible[:1] * 2
        os.environ[VISIBLE] = ",".join(visible)
    gpus = min(MOST_GPUS, len(visible))
    folder = day.folder / f"services-{how}"
    shutil.rmtree(folder / "runs", ignore_errors=True)  # of an attempt that failed
    changes = devices(gpus) if how == "lent" else fluid(gpus)
    if how == "shared":
        changes["trainer.exchange"] = "store"  # NCCL has one member per GPU
    recipe = write_recipe(folder, model_folder(day), shape, cpu=day.cpu, changes=changes)
    finished = asyncio.run(
        run_recipe(recipe, folder / "runs", limit_s=LIMIT_S,
                   kill=Kill(KILLED, 1) if how == "shared" else None)
    )  # fmt: skip
    return {
        "changes": changes, "batch": [shape.groups, shape.group_size], **figures(finished),
        "schedule": finished.summary["schedule"], "killed": finished.watched.killed,
        "checksums": checksums(folder / "runs" / NAME / "logs") if how != "lent" else {},
    }  # fmt: skip


def checksums(logs: Path) -> dict[str, dict[str, str]]:
    """Returns what each fluid device found for the bits of weights and optimizer after its own
    step, by version and worker."""
    found: dict[str, dict[str, str]] = {}
    for log in sorted(logs.glob("trainer-*.log")):
        for line in log.read_text().splitlines():
            if '"event": "stepped"' in line:
                entry = json.loads(line)
                of_version = found.setdefault(str(entry["version"]), {})
                of_version[entry["worker"]] = entry["checksum"]
    return found


def fluid(gpus: int) -> dict[str, Any]:
    """Returns the keys of a recipe whose devices all do both; two processes on a CPU.

    >>> fluid(8)
    {'schedule.mode': 'fluid', 'trainer.devices': 8, 'rollout.workers': 0}
    """
    return {"schedule.mode": "fluid", "trainer.devices": gpus or 2, "rollout.workers": 0}


def devices(gpus: int) -> dict[str, Any]:
    """Returns the keys of a recipe that spread it over so many GPUs.

    >>> devices(1)
    {'schedule.mode': 'colocated', 'rollout.workers': 0}
    >>> devices(4)
    {'trainer.devices': 2, 'rollout.workers': 2, 'schedule.tag': 'auto'}
    """
    if gpus == 1:
        return {"schedule.mode": "colocated", "rollout.workers": 0}
    if not gpus:
        return {"rollout.workers": 1}
    trainers = gpus // 2
    return {"trainer.devices": trainers, "rollout.workers": gpus - trainers,
            "schedule.tag": "auto"}  # fmt: skip
