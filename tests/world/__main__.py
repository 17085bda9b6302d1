"""Runs worlds.

python -m tests.world SEED                  its log, and what is wrong with it
python -m tests.world SEED --shorter        with as few faults as still lead to it
python -m tests.world --seeds 20000 --log runs/world.log      goes on where the log ends
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tests.world.run import Outcome
from tests.world.sweep import run_seed, run_seeds, shortened


def main(
    seed: Annotated[int | None, typer.Argument(help="a world")] = None,
    shorter: Annotated[bool, typer.Option(help="leave out faults that are not needed")] = False,
    plant: Annotated[list[str] | None, typer.Option(help="a planted bug")] = None,
    seeds: Annotated[int, typer.Option(help="so many worlds")] = 0,
    first: Annotated[int, typer.Option(help="the first of them")] = 0,
    at_once: Annotated[int, typer.Option(help="processes")] = 2,
    log: Annotated[Path | None, typer.Option(help="gets a line per seed")] = None,
) -> None:
    if seed is not None:
        outcome = run_seed(seed, plants=plant or ())
        if shorter and not outcome.is_well:
            outcome = shortened(outcome, plants=plant or ())
        sys.stdout.write("\n".join(outcome.log) + "\n" + _line(outcome) + "\n")
        raise typer.Exit(0 if outcome.is_well else 1)
    done = _done(log)
    wanted = (each for each in range(first, first + seeds) if each not in done)
    bad = 0
    for outcome in run_seeds(wanted, at_once=at_once, plants=plant or ()):
        bad += not outcome.is_well
        line = _line(outcome)
        if log is not None:
            with log.open("a") as file:
                file.write(line + "\n")
        if log is None or not outcome.is_well:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    raise typer.Exit(1 if bad else 0)


def _line(outcome: Outcome) -> str:
    found = "; ".join(outcome.violations) or "well"
    return (
        f"{outcome.seed} {outcome.digest[:12]} {len(outcome.faults)} faults "
        f"{outcome.virtual_seconds:.1f} s {1000 * outcome.cpu_seconds:.0f} ms: {found}"
    )


def _done(log: Path | None) -> set[int]:
    if log is None or not log.exists():
        return set()
    return {int(line.split()[0]) for line in log.read_text().splitlines() if line}


if __name__ == "__main__":
    typer.run(main)
