"""Compares what the tracer says of SD3.5-M's memory with what the allocator gives out.

On a CPU, where nobody counts, the same calls are made and only the traced figures are found.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch

from bench.full_size.model import write_model
from bench.full_size.recipe import PROMPTS, Shape, write_recipe
from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData
from shared.diffusion.generation import GenerationInProgress, Generator
from shared.diffusion.loading.device import release
from shared.diffusion.policy import load_policy
from shared.messages.contracts import Fragment, GenerateFragment, Policy, Prompt
from shared.recipe.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from bench.gpu_day.day import Day

SHAPE = Shape(side=512, steps=10, groups=1, group_size=8, batches=1)
TINY_SHAPE = Shape(side=32, steps=3, groups=1, group_size=4, batches=1)
CLOSE = 0.10
"""Largest difference that counts as equal, over what was measured."""


@dataclass(slots=True)
class Allocator:
    """Measures the most that work takes beyond what was there before, and what it leaves there."""

    device: torch.device

    @property
    def counts(self) -> bool:
        return self.device.type == "cuda"

    def now(self) -> int | None:
        return torch.cuda.memory_allocated(self.device) if self.counts else None

    def peak(self, work: Callable[[], object]) -> int | None:
        if not self.counts:
            work()
            return None
        release(self.device)
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


def measure(day: "Day") -> dict[str, Any]:
    """Returns traced and measured bytes by what they are of."""
    model = model_folder(day)
    shape = TINY_SHAPE if day.tiny else SHAPE
    path = write_recipe(day.folder / "memory", model, shape, cpu=day.cpu)
    recipe = load_recipe(path)
    measured = _measured(recipe)
    traced = _traced(recipe)
    rows = {name: _compared(traced[name], measured[name]) for name in traced}
    differences = [abs(row["difference"]) for row in rows.values() if row["difference"] is not None]
    return {
        "rows": rows,
        "within": CLOSE,
        "passed": max(differences) <= CLOSE if differences else None,
    }


def model_folder(day: "Day") -> Any:
    folder = day.folder / ("sd35-tiny" if day.tiny else "sd35-medium")
    write_model(folder, tiny=day.tiny, report=print_line)
    return folder


def print_line(line: str) -> None:
    import sys

    sys.stdout.write(f"{line}\n")


def _compared(traced: float, measured: int | None) -> dict[str, float | None]:
    difference = None if not measured else traced / measured - 1
    return {"traced": traced, "measured": measured, "difference": difference}


def _traced(recipe: Recipe) -> dict[str, float]:
    """Returns the tracer's figures by the names of `_measured`."""
    setting = resolve_name("digenrl.trace.runs:trace_setting")(recipe, recipe.batch.group_size)
    found = resolve_name("digenrl.trace.runs:trace")(
        recipe, setting, is_published=False, say=print_line
    )
    weights, size = found.weights, recipe.batch.group_size
    return {
        "weights": weights.network + weights.trained + sum(weights.text.values()) + weights.decoder,
        "denoising, 1 sample": found.denoise_peak(1),
        f"denoising, {size} samples": found.denoise_peak(size),
        **{f"training, {rows} rows": found.training.peak_bytes(rows) for rows in _rows(recipe)},
    }


def _measured(recipe: Recipe) -> dict[str, int | None]:
    empty = Allocator(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
    before = empty.now()
    loaded = load_policy(recipe, {"transformer", "text", "decoder"})
    allocator, held = Allocator(loaded.device), empty.now()
    found = {"weights": None if held is None or before is None else held - before}
    generator, size = Generator(recipe, loaded), recipe.batch.group_size
    for count in (1, size):
        work = generator.begin(task_of(count))
        generator.advance(work)  # the first call of a shape takes work spaces
        name = "denoising, 1 sample" if count == 1 else f"denoising, {count} samples"
        found[name] = allocator.peak(_advance(generator, work))
    group = group_of(generator, size)
    engine = TrainerEngine(recipe, loaded)
    for rows in _rows(recipe):
        engine.begin()
        found[f"training, {rows} rows"] = allocator.peak(_train(engine, group, Chunk(rows, 1)))
    return found


def _rows(recipe: Recipe) -> tuple[int, ...]:
    return (1, min(4, recipe.batch.group_size))


def _advance(generator: Generator, work: GenerationInProgress) -> Callable[[], object]:
    return lambda: generator.advance(work)


def _train(engine: TrainerEngine, group: GroupData, chunk: Chunk) -> Callable[[], object]:
    return lambda: engine.train(engine.read(group), chunk)


def group_of(generator: Generator, size: int) -> GroupData:
    """Generates a group, and gives it advantages."""
    made = generator.generate(task_of(size))
    return GroupData(
        trajectories=(made.trajectory,),
        conditions=generator.conditions(PROMPTS[0]),
        advantages=tuple((-1.0) ** number for number in range(size)),
    )


def task_of(num_samples: int) -> GenerateFragment:
    """Returns what a generator is asked for: the first samples of a group."""
    return GenerateFragment(
        fragment=Fragment(batch=0, group=0, first_sample=0, num_samples=num_samples, attempt=0),
        policy=Policy(version=0, weights_digest="0" * 64),
        prompt=Prompt(text=PROMPTS[0]),
        window_start=0,
        worker="gpu-day",
    )
