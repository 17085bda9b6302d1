"""The command of ``python -m bench`` that measures growth; it imports what it needs."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def growth(
    devices: Annotated[list[int] | None, typer.Option(help="repeatable; 512 and 2,048")] = None,
    steps: Annotated[list[int] | None, typer.Option(help="repeatable; 100 and 10,000")] = None,
    groups: Annotated[int, typer.Option(help="of a commit record, of 16 samples")] = 32,
    live: Annotated[int, typer.Option(help="workers of the real scheduler; 0: none")] = 0,
    batches: Annotated[int, typer.Option(help="that these open")] = 20,
    folder: Annotated[Path, typer.Option(help="for records and brokers")] = Path(
        "runs/bench-growth"
    ),
) -> None:
    """Measure how the scheduler's work grows with devices and with the steps of a run."""
    from bench.growth.measured import measure_all

    looked_at, long = devices or (512, 2048), steps or (100, 10_000)
    for row in measure_all(folder.resolve(), looked_at, long, groups, live, batches):
        sys.stdout.write(json.dumps(row, indent=1) + "\n")
