"""What SD3.5-M's denoising steps and training passes take in the forms that a recipe can ask for,
and whether the host waits for the device in one.
"""

import statistics
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bench.full_size.recipe import Shape, write_recipe
from bench.gpu_day.memory import TINY_SHAPE, Allocator, group_of, model_folder, print_line, task_of
from bench.gpu_day.report import keep
from digenrl.trace.device_profile.ladder import timed
from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.chunks import Chunk
from shared.diffusion.generation import Generator
from shared.diffusion.loading.device import release
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.models.memory import ModelPart
from shared.recipe.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from bench.gpu_day.day import Day

Changes = Mapping[str, Any]
SHAPE = Shape(side=512, steps=6, groups=1, group_size=8, batches=1)
FORMS: Mapping[str, Changes] = {
    "bfloat16": {},
    "int8": {"rollout.weights": "int8", "rollout.workers": 1},
    "w8a8": {"rollout.weights": "w8a8", "rollout.workers": 1},
    "fp8": {"rollout.weights": "fp8", "rollout.workers": 1},
    "nf4": {"rollout.weights": "nf4", "rollout.workers": 1},
    "streamed": {"rollout.memory": "streamed", "rollout.workers": 1},
    "compiled": {"model.compile": "regional"},
}
"""Changes of the recipe, by what they do to a denoising step."""
GRADIENTS: Mapping[str, Changes] = {
    "both": {},
    "conditional": {"algorithm.cfg_gradient": "conditional"},
    "streamed": {"trainer.memory": "streamed", "trainer.gradient_checkpointing": True},
    "offloaded": {"trainer.gradient_checkpointing": "offloaded"},
}
"""Changes of the recipe, by what they do to a training pass."""
COMPILED: Mapping[str, Changes] = {
    "both": {}, "compiled": {"model.compile": "regional"}, "int8 base": {"model.weights": "int8"},
}  # fmt: skip
WINDOW = {"sampling.window": 2}
"""Trained steps of a group: its passes are as long with few as with many."""
ON_GPUS = "compiled"
"""Form that a CPU leaves out: its compiler takes minutes."""
ROWS = 8
TIMES = 3


def measure(day: "Day") -> dict[str, Any]:
    """Returns seconds and bytes by form, and the places where the host waited."""
    forms = {"denoising": (FORMS, _denoised), "training": (GRADIENTS, _trained)}
    return _measured(day, "passes", forms)


def compiled(day: "Day") -> dict[str, Any]:
    """Returns the same of training passes: as they are, compiled, and on a quantised base."""
    return _measured(day, "compiled", {"training": (COMPILED, _trained)})


Work = Callable[["Day", Changes], dict[str, Any]]


def _measured(
    day: "Day", part: str, kinds: Mapping[str, tuple[Mapping[str, Changes], Work]]
) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": ROWS}
    for what, (forms, work) in kinds.items():
        found[what] = {}
        for name, changes in forms.items():
            if not (day.cpu and name == ON_GPUS):
                print_line(f"{what}: {name}")
                found[what][name] = tried(partial(work, day, changes))
                keep(day.folder, part, found)
    return found


def tried(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what was found, or why nothing: one form takes nothing from the others."""
    try:
        return work()
    except Exception as error:
        print_line(traceback.format_exc())
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _generator(
    day: "Day", changes: Changes, *, trains: bool
) -> tuple[Recipe, LoadedPolicy, Generator]:
    shape = TINY_SHAPE if day.tiny else SHAPE
    path = write_recipe(
        day.folder / "passes", model_folder(day), shape, cpu=day.cpu, changes=changes
    )
    recipe = load_recipe(path)
    parts: set[ModelPart] = {"transformer", "text", "decoder"}
    loaded = (
        load_policy(recipe, parts, trains=True)
        if trains
        else load_policy(recipe, parts, holding=recipe.holding)
    )
    return recipe, loaded, Generator(recipe, loaded)


def _denoised(day: "Day", changes: Changes) -> dict[str, Any]:
    empty = Allocator(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
    if empty.counts:
        release(empty.device)
    before = empty.now()
    recipe, loaded, generator = _generator(day, changes, trains=False)
    held = empty.now()
    size = recipe.batch.group_size
    began = time.monotonic()
    work = generator.begin(task_of(size))
    generator.advance(work)
    first = time.monotonic() - began
    generator.advance(work)
    waits = _waits(lambda: generator.advance(work))
    times = []
    while not work.done:
        times.append(timed(loaded.device, lambda: generator.advance(work)))
    latents = work.denoising.latents.float()
    finish = timed(loaded.device, lambda: generator.finish(work))
    return {
        "first_step": first,
        "step": statistics.median(times) if times else None,
        "finish": finish,
        "samples": size,
        "weights_bytes": None if held is None or before is None else held - before,
        "finite": bool(torch.isfinite(latents).all()),
        "waits": waits,
    }


def _trained(day: "Day", changes: Changes) -> dict[str, Any]:
    recipe, loaded, generator = _generator(day, {**WINDOW, **changes}, trains=True)
    size = recipe.batch.group_size
    engine = TrainerEngine(recipe, loaded)
    chunk = Chunk(min(ROWS, size), 1)
    passes = size // chunk.samples * recipe.sampling.window

    def train() -> None:
        engine.begin()
        engine.train(read, chunk)

    read = engine.read(group_of(generator, size))
    began = time.monotonic()
    train()
    first = time.monotonic() - began
    waits = _waits(train)
    times = [timed(loaded.device, train) for _ in range(TIMES)]
    norm = torch.stack([each.norm() for each in engine.gradient().values()]).norm()
    return {
        "first_group": first,
        "pass": statistics.median(times) / passes,
        "passes": passes,
        "onpolicy_ratio_error": engine.tally["onpolicy_ratio_error"],
        "gradient_norm": float(norm),
        "waits": waits,
    }


def _waits(work: Callable[[], object]) -> dict[str, int] | None:
    """Counts the calls in which the host waited for the device, by the line of Python that made
    them; None on a CPU. To wait for an event, as a step does to keep its pace, is not counted."""
    if not torch.cuda.is_available():
        work()
        return None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = [
        f"{'/'.join(each.filename.split('/')[-3:])}:{each.lineno}"
        for each in caught
        if "synchroniz" in str(each.message)
    ]
    return dict(Counter(places))
