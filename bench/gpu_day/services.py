"""Trains SD3.5-M with random weights for ten steps through all services, on the GPUs of this host.

One GPU generates and trains by turns; of several, the first half trains and the others generate.
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

SHAPE = Shape(side=512, steps=10, groups=4, group_size=8, batches=10)
TINY_SHAPE = Shape(side=32, steps=3, groups=2, group_size=4, batches=2)
MOST_GPUS = 8
LIMIT_S = 24 * 60


def measure(day: "Day") -> dict[str, Any]:
    """Returns what the run took, and where it ran."""
    shape = TINY_SHAPE if day.tiny else SHAPE
    gpus = 0 if day.cpu else min(MOST_GPUS, len(visible_gpus()))
    folder = day.folder / "services"
    shutil.rmtree(folder / "runs", ignore_errors=True)  # of an attempt that failed
    changes = devices(gpus)
    recipe = write_recipe(folder, model_folder(day), shape, cpu=day.cpu, changes=changes)
    finished = asyncio.run(run_recipe(recipe, folder / "runs", limit_s=LIMIT_S))
    schedule = finished.summary["schedule"]
    return {"changes": changes, "batch": [shape.groups, shape.group_size], **figures(finished),
            "schedule": schedule}  # fmt: skip


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
