"""Runs a storm and prints what was done to which process, how far the run came and every rule that
it broke: ``make chaos``."""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tests.storm.faults import ALL_KINDS, GAP_S, KINDS
from tests.storm.storm import CALM_S, LAGGED, through


def main(
    seed: int = 0,
    faults: int = 40,
    minutes: Annotated[float | None, typer.Option(help="over which faults are spread")] = None,
    all: Annotated[bool, typer.Option("--all", help="all kinds, and a second scheduler")] = False,
    staleness: int = 0,
    lags: Annotated[bool, typer.Option("--lags", help="other weights generate")] = False,
    calm: Annotated[float, typer.Option(help="seconds in which it must go on")] = CALM_S,
    folder: Annotated[Path | None, typer.Option(help="for logs, which then stay")] = None,
) -> None:
    """Disturb a run at random, and judge its records."""
    folder = folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    gap = minutes * 60 / faults if minutes else GAP_S
    changes = (LAGGED if lags else {}) | {"max_staleness": staleness}
    kinds = ALL_KINDS if all else KINDS
    found = asyncio.run(
        through(folder, seed, faults, kinds=kinds, gap=gap, standby=all, calm_s=calm, **changes)
    )
    sys.stdout.write("\n".join(found.lines()) + "\n")
    raise typer.Exit(1 if found.violations else 0)


if __name__ == "__main__":
    typer.run(main)
