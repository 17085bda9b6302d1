"""`python -m bench tail-check`: what a coarse tail does to the rewards."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bench.tail_check.agreement import Agreement
    from bench.tail_check.measure import TailCheck
    from shared.recipe.recipe import Recipe

MAX_SAMPLES = 12
MIN_CORRELATION = 0.9
"""A gradient whose rewards correlate so with the whole schedule's learns from a sample about its
square, 0.81, of what it would."""


def tail_check(
    recipe: Annotated[Path, typer.Argument(help="the run's recipe, with all steps")],
    tail: Annotated[int, typer.Option(min=1, help="steps after the end of the last window")],
    prompts: Annotated[int, typer.Option(min=1, help="number of prompts")] = 16,
    samples: Annotated[
        int | None, typer.Option(min=2, help="samples per prompt; by default a group's, 12 at most")
    ] = None,
) -> None:
    """Compare the ranking of samples with a coarse tail and with all steps."""
    from shared.process.worker_process import prepare_libraries
    from shared.recipe.recipe import load_recipe
    from shared.telemetry import quiet_logs

    quiet_logs()
    loaded = load_recipe(recipe)
    prepare_libraries(loaded, threads=loaded.rollout.threads)
    from bench.tail_check.measure import tail_check as measure
    from bench.tail_check.measure import with_coarse_tail
    from digenrl.local.checking.inputs import check_inputs

    check_inputs(loaded)
    num_samples = samples or min(MAX_SAMPLES, loaded.batch.group_size)
    coarse = with_coarse_tail(loaded, tail)
    found = measure(
        loaded, coarse, num_prompts=prompts, num_samples=num_samples, progress=_progress
    )
    for line in lines(found, loaded, coarse):
        typer.echo(line)


def lines(found: "TailCheck", recipe: "Recipe", coarse: "Recipe") -> Iterator[str]:
    """Describe what was found; the first row of figures decides."""
    sampling, within = coarse.sampling, found.reward.within
    yield (
        f"{recipe.model.name}: {sampling.steps} steps against all {recipe.sampling.steps}, "
        f"{found.prompts} prompts; rank correlation"
    )
    yield f"{'':<24}{'within groups':<18}{'groups':<8}over all samples"
    yield _row("reward (decides)", found.reward)
    for name, each in found.scorers.items():
        yield _row(name, each)
    if within is None:
        yield "in no group do rewards differ; measure with more --prompts and --samples"
    elif within < MIN_CORRELATION:
        yield (
            f"less than {MIN_CORRELATION}: training would rank samples by something else; measure "
            "a longer --tail"
        )
    else:
        assert not isinstance(sampling.sigmas, str)
        numbers = ", ".join(f"{sigma:.4g}" for sigma in sampling.sigmas)
        yield f"for the recipe: sampling.steps = {sampling.steps}, sampling.sigmas = [{numbers}]"


def _row(name: str, each: "Agreement") -> str:
    error = "" if each.error is None else f" +- {each.error:.3f}"
    return f"{name:<24}{_number(each.within) + error:<18}{each.groups:<8}{_number(each.overall)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _progress(done: int, of: int) -> None:
    if of >= 8 and done and done % max(1, of // 4) == 0 and done < of:
        typer.echo(f"{done} of {of} prompts", err=True)
