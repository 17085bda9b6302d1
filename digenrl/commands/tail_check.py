"""`digenrl tail-check`: what a coarse tail does to the rewards."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from digenrl.commands.options import RUNS, RecipeFile, Runs
from digenrl.commands.recipe_options import given_keys
from shared.errors import UserError

if TYPE_CHECKING:
    from digenrl.tail.agreement import Agreement
    from digenrl.tail.results import TailCheck

MAX_SAMPLES = 12


def tail_check(
    context: typer.Context,
    recipe: RecipeFile,
    prompts: Annotated[int, typer.Option(min=1, help="number of prompts")] = 16,
    samples: Annotated[
        int | None,
        typer.Option(min=2, help="samples per prompt; by default a group's, 12 at most"),
    ] = None,
    runs: Runs = RUNS,
) -> None:
    """Measure whether samples of a coarse tail (sampling.tail) are ranked as those of all steps."""
    from shared.process.worker_process import prepare_libraries
    from shared.recipe.recipe import load_recipe
    from shared.telemetry import quiet_logs

    quiet_logs()
    loaded = load_recipe(recipe, given_keys(context))
    if loaded.sampling.tail is None:
        raise UserError(f"sampling.tail: {recipe} has none, so there is nothing to measure")
    prepare_libraries(loaded, threads=loaded.rollout.threads)
    from digenrl.local.inputs import check_inputs
    from digenrl.tail.measure import tail_check as measure
    from digenrl.tail.results import keep, why_refused

    check_inputs(loaded)
    found = measure(
        loaded,
        num_prompts=prompts,
        num_samples=samples or min(MAX_SAMPLES, loaded.batch.group_size),
        progress=_progress,
    )
    path = keep(runs, found)
    for line in lines(found):
        typer.echo(line)
    least = loaded.sampling.tail_correlation
    typer.echo(f"kept in {path}; sampling.tail_correlation asks for {least:g}")
    reason = why_refused(loaded, found)
    if reason is not None:
        raise UserError(f"sampling.tail: {reason}")


def lines(found: "TailCheck") -> Iterator[str]:
    """Say what was found, for people; the first row of figures decides."""
    yield (
        f"{found.model}: {found.num_steps} steps beside all {found.steps}, {found.prompts} prompts "
        f"x {found.samples} samples of the same noise; rank correlation"
    )
    yield f"{'':<24}{'within groups':<18}{'groups':<8}over all samples"
    yield _row("reward (decides)", found.reward)
    for name, each in found.scorers.items():
        yield _row(name, each)


def _row(name: str, each: "Agreement") -> str:
    error = "" if each.error is None else f" +- {each.error:.3f}"
    return f"{name:<24}{_number(each.within) + error:<18}{each.groups:<8}{_number(each.overall)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _progress(done: int, of: int) -> None:
    if of >= 8 and done and done % max(1, of // 4) == 0 and done < of:
        typer.echo(f"{done} of {of} prompts", err=True)
