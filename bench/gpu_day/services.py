"""Trains SD3.5-M with random weights for four steps through all services, on the GPUs of this host.

Fluid devices generate and train what there is. Otherwise one GPU does both by turns; of several,
the first half trains and is lent, and the others generate.
"""

import asyncio
import shutil
from typing import TYPE_CHECKING, Any

from bench.full_size.recipe import Shape, write_recipe
from bench.full_size.run import figures, run_recipe
from bench.gpu_day.memory import model_folder
from digenrl.local.gpus import visible_gpus

if TYPE_CHECKING:
    from bench.gpu_day.day import Day

SHAPE = Shape(side=512, steps=6, groups=4, group_size=8, batches=4)
TINY_SHAPE = Shape(side=32, steps=3, groups=2, group_size=4, batches=2)
MOST_GPUS = 8
LIMIT_S = 12 * 60


def measure(day: "Day", how: str) -> dict[str, Any]:
    """Returns what the run took, and where it ran. ``how``: "fluid" or "lent"."""
    shape = TINY_SHAPE if day.tiny else SHAPE
    gpus = 0 if day.cpu else min(MOST_GPUS, len(visible_gpus()))
    folder = day.folder / f"services-{how}"
    shutil.rmtree(folder / "runs", ignore_errors=True)  # of an attempt that failed
    changes = fluid(gpus) if how == "fluid" else devices(gpus)
    recipe = write_recipe(folder, model_folder(day), shape, cpu=day.cpu, changes=changes)
    finished = asyncio.run(run_recipe(recipe, folder / "runs", limit_s=LIMIT_S))
    schedule = finished.summary["schedule"]
    return {"changes": changes, "batch": [shape.groups, shape.group_size], **figures(finished),
            "schedule": schedule}  # fmt: skip


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
