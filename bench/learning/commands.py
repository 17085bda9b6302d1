"""The commands of ``python -m bench`` that measure learning; each imports what it needs."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

LearningResults = Annotated[Path, typer.Option(help="a JSON file per case goes here")]
LEARNING_RESULTS = Path("bench/learning/results")


def learning(
    everything: Annotated[
        bool, typer.Option("--all", help="every choice on every task, not the main table alone")
    ] = False,
    choice: Annotated[list[str] | None, typer.Option(help="only this one; repeatable")] = None,
    task: Annotated[str | None, typer.Option(help="only this one")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="at most so many of each")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="processes, each of one thread")] = 2,
    minutes: Annotated[float | None, typer.Option(help="begin no case after so long")] = None,
    results: LearningResults = LEARNING_RESULTS,
    log: Annotated[Path, typer.Option(help="gets a line per case")] = Path(
        "runs/bench-learning.log"
    ),
) -> None:
    """Measure what each choice of a recipe learns for its work, and write tables and curves.

    Cases that have a result are left out, so that it goes on wherever it was stopped.
    """
    import time

    from bench.learning.suite import run_all, wanted

    found = wanted(everything=everything, names=choice or (), task=task, most_seeds=seeds)
    until = None if minutes is None else time.time() + 60 * minutes
    whole = run_all(found, results, log, at_once=at_once, until=until)
    if not whole:
        raise typer.Exit(1)


def learning_services(
    seed: Annotated[list[int] | None, typer.Option(help="repeatable; 60 to 64 if none")] = None,
    old: Annotated[Path, typer.Option(help="a recipe")] = Path("bench/learning/digits.toml"),
    new: Annotated[Path, typer.Option(help="another")] = Path("recipes/digits.toml"),
    results: Annotated[Path, typer.Option(help="a JSON file per run goes here")] = Path(
        "bench/learning/results/services"
    ),
    folder: Annotated[Path, typer.Option(help="of the runs")] = Path("runs/bench-learning"),
) -> None:
    """Run two recipes by turns through the real services, and compare their device seconds."""
    from bench.learning.services import compared, measure

    seeds = seed or range(60, 65)
    measure({"old": old, "new": new}, list(seeds), results, folder.resolve())
    sys.stdout.write(json.dumps(compared(results, "old", "new"), indent=1) + "\n")


def shared_noise(
    recipe: Annotated[Path, typer.Argument(help="for its model, sampling and batch")],
    rounds: Annotated[int, typer.Option(min=1, help="of each, by turns")] = 9,
    groups: Annotated[int, typer.Option(min=1, help="of each round")] = 4,
) -> None:
    """Compare what shared noise saves with what the planner forecasts of it."""
    from bench.shared_noise import compare, show
    from shared.recipe.recipe import load_recipe

    show(compare(load_recipe(recipe), rounds, groups))


def learning_tables(
    results: LearningResults = LEARNING_RESULTS,
    page: Annotated[Path, typer.Option(help="whose tables are written anew")] = Path(
        "docs/learning.md"
    ),
    curves: Annotated[Path, typer.Option(help="picture of the curves")] = Path(
        "docs/images/learning-curves.png"
    ),
) -> None:
    """Write the tables and curves of learning results that are there."""
    from bench.learning.output import draw, with_tables
    from bench.learning.task import DIGITS

    page.write_text(with_tables(page.read_text(), results))
    draw(curves, results, DIGITS)
