"""SD3.5-M at full size on the CPU: one group of two samples, generated and trained once."""

import asyncio
from pathlib import Path

from rich.console import Console

from bench.full_size.model import write_model
from bench.full_size.recipe import Shape, write_recipe
from bench.full_size.run import figures, markdown, run_recipe
from bench.stored import write_result

SHAPE = Shape(side=256, steps=2, groups=1, group_size=2, batches=1)
TINY_SHAPE = Shape(side=32, steps=2, groups=1, group_size=2, batches=1)
CHANGES = {"trainer.micro_batch": 2, "schedule.fragment_size": 2}
"""Both samples are trained in one pass, as they were generated."""
TITLE = "SD3.5-M at full size, on the CPU"
HOW = """\
Once, to show that nothing depends on the size of a model: SD3.5-M as it is published (2.24 billion
parameters and both CLIP encoders, without T5), with random weights in bfloat16, trained by
Flow-GRPO with guidance {guidance}, a KL term and a LoRA adapter of rank 32 through all services of
`digenrl up`: {groups} group of {group_size} samples of {side} x {side} pixels, {steps} denoising
steps, one optimizer step, and the report with its evaluation before and after. One CPU thread per
process. Made by `python -m bench full-size --model FOLDER --out docs/full-size-cpu.md`."""


def measure(
    model: Path,
    folder: Path,
    console: Console,
    *,
    out: Path | None,
    json_file: Path | None,
    limit_s: float,
    tiny: bool,
) -> None:
    """Writes the model and its recipe, runs it, and prints and writes what it took."""
    shape = TINY_SHAPE if tiny else SHAPE
    write_model(model, tiny=tiny, report=console.print)
    recipe = write_recipe(folder, model.resolve(), shape, cpu=True, changes=CHANGES)
    finished = asyncio.run(run_recipe(recipe, folder / "runs", limit_s=limit_s))
    found = figures(finished)
    how = HOW.format(
        guidance=shape.guidance, groups=shape.groups, group_size=shape.group_size,
        side=shape.side, steps=shape.steps,
    )  # fmt: skip
    text = markdown(found, title=TITLE, how=how)
    console.print(text, markup=False, highlight=False)
    if out is not None:
        out.write_text(text)
    if json_file is not None:
        write_result(json_file, found)
