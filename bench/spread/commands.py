"""The command of ``python -m bench`` that measures how versions spread; imports what it needs."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def spread(
    hosts: Annotated[str, typer.Option(help="numbers of hosts, with commas")] = "1,8",
    workers: Annotated[int, typer.Option(min=1, help="on each host")] = 8,
    megabytes: Annotated[float, typer.Option(help="size of a version")] = 100.0,
    line: Annotated[float, typer.Option(help="MB/s of each host's line, in each direction")] = 50.0,
    versions: Annotated[int, typer.Option(min=1, help="that are published")] = 3,
    share: Annotated[bool, typer.Option(help="hosts pass on what they receive")] = True,
    folder: Annotated[Path, typer.Option(help="for brokers, caches and logs")] = Path(
        "runs/bench-spread"
    ),
) -> None:
    """Measure how long many hosts take to adopt a version; needs root and network namespaces."""
    import shutil
    from dataclasses import asdict
    from statistics import median

    from bench.spread.run import measure

    shutil.rmtree(folder, ignore_errors=True)
    numbers = [int(each) for each in hosts.split(",")]
    found = measure(
        numbers, workers=workers, size=round(megabytes * 1e6), versions=versions,
        megabytes_per_s=line, folder=folder, shares=share,
    )  # fmt: skip
    for each in found:
        figures = {"median_s": round(median(each.seconds), 3), **asdict(each)}
        sys.stdout.write(json.dumps(figures, indent=1) + "\n")
