"""`python -m bench tail-check`: what a coarse tail does to the rewards."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared.recipe.sampling import MIN_CORRELATION

if TYPE_CHECKING:
    from bench.tail_check.agreement import Agreement
    from bench.tail_check.measure import TailCheck
    from shared.recipe.recipe import Recipe

MAX_SAMPLES = 12


def tail_check(
    recipe: Annotated[Path, typer.Argument(help="the run's recipe, with or without a tail")],
    tail: Annotated[int, typer.Option(min=1, help="value of sampling.tail to measure")],
    prompts: Annotated[int, typer.Option(min=1, help="number of prompts")] = 16,
    samples: Annotated[
        int | None,
        typer.Option(min=2, help="samples per prompt; by default a group's, 12 at most"),
    ] = None,
) -> None:
    """Measure whether samples of a coarse tail (sampling.tail) are ranked as those of all steps."""
    from shared.process.worker_process import prepare_libraries
    from shared.recipe.recipe import load_recipe
    from shared.telemetry import quiet_logs

    quiet_logs()
    loaded = load_recipe(recipe, {"sampling.tail": tail, "sampling.tail_correlation": 1.0})
    prepare_libraries(loaded, threads=loaded.rollout.threads)
    from bench.tail_check.measure import tail_check as measure
    from digenrl.local.checking.inputs import check_inputs

    check_inputs(loaded)
    num_samples = samples or min(MAX_SAMPLES, loaded.batch.group_size)
    found = measure(loaded, num_prompts=prompts, num_samples=num_samples, progress=_progress)
    for line in lines(found, loaded):
        typer.echo(line)


def lines(found: "TailCheck", recipe: "Recipe") -> Iterator[str]:
    """Describe what was found; the first row of figures decides."""
    sampling, within = recipe.sampling, found.reward.within
    yield (
        f"{recipe.model.name}: {sampling.num_steps} steps beside all {sampling.steps}, "
        f"{found.prompts} prompts; rank correlation"
    )
    yield f"{'':<24}{'within groups':<18}{'groups':<8}over all samples"
    yield _row("reward (decides)", found.reward)
    for name, each in found.scorers.items():
        yield _row(name, each)
    if within is None:
        yield "in no group do rewards differ; measure with more --prompts and --samples"
    elif within < MIN_CORRELATION:
        yield f"less than {MIN_CORRELATION}, which recipes need; measure a longer --tail"
    else:
        yield f"for the recipe: sampling.tail = {sampling.tail}, tail_correlation = {within:.2f}"


def _row(name: str, each: "Agreement") -> str:
    error = "" if each.error is None else f" +- {each.error:.3f}"
    return f"{name:<24}{_number(each.within) + error:<18}{each.groups:<8}{_number(each.overall)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _progress(done: int, of: int) -> None:
    if of >= 8 and done and done % max(1, of // 4) == 0 and done < of:
        typer.echo(f"{done} of {of} prompts", err=True)
