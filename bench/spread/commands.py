"""The commands of ``python -m bench`` that measure hosts in network namespaces; they import what
they need."""

import json
import sys
from enum import StrEnum
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


class FarMode(StrEnum):
    roles = "roles"
    fluid = "fluid"


class FarExchange(StrEnum):
    store = "store"
    group = "group"


def far_runs(
    mode: Annotated[FarMode, typer.Option(help="of the demo: digits or digits-fluid")],
    exchange: Annotated[FarExchange, typer.Option(help="fluid: how sums are exchanged")],
    near: Annotated[int, typer.Option(min=1, help="workers without a slow line")] = 1,
    mbits: Annotated[str, typer.Option(help="rates of the line, in Mbit/s, with commas")] = "1,0.1",
    delay: Annotated[float, typer.Option(help="seconds of the line, in each direction")] = 0.025,
    batches: Annotated[int, typer.Option(min=3, help="alone, and with each rate")] = 6,
    cut: Annotated[float, typer.Option(help="seconds without the first line")] = 0.0,
    folder: Annotated[Path, typer.Option(help="for brokers, caches and logs")] = Path(
        "runs/bench-far-runs"
    ),
) -> None:
    """Measure runs with a worker behind a slow line; needs root, namespaces and /dev/net/tun."""
    from dataclasses import asdict

    from bench.spread.far_line import FarLine
    from bench.spread.far_run import measure_run

    lines = [FarLine(float(each), delay) for each in mbits.split(",")]
    found = measure_run(
        folder, mode.value, lines,
        near=near, alone=batches, together=batches, exchange=exchange.value, cut_s=cut,
    )  # fmt: skip
    sys.stdout.write(json.dumps(asdict(found), indent=1) + "\n")


def far_transfers(
    mbits: Annotated[str, typer.Option(help="rates of lines, in Mbit/s, with commas")] = "4,10",
    delay: Annotated[float, typer.Option(help="seconds, in each direction")] = 0.025,
    loss: Annotated[float, typer.Option(help="share of the frames")] = 0.001,
    queue: Annotated[int, typer.Option(help="bytes that wait")] = 1 << 16,
    cut: Annotated[float, typer.Option(help="seconds without a line in each transfer")] = 0.0,
    megabytes: Annotated[float, typer.Option(help="size of an object")] = 30.0,
    times: Annotated[int, typer.Option(min=1, help="each way")] = 1,
    folder: Annotated[Path, typer.Option(help="for brokers and logs")] = Path(
        "runs/bench-far-transfers"
    ),
) -> None:
    """Measure objects on their way to the store and back, and the statuses meanwhile."""
    from dataclasses import asdict

    from bench.spread.far_line import FarLine
    from bench.spread.transfers import Cut, measure_transfers

    lines = [FarLine(float(each), delay, loss, queue) for each in mbits.split(",")]
    size = round(megabytes * 1e6)
    found = measure_transfers(
        lines, size=size, times=times, folder=folder, cut=Cut(5.0, cut) if cut else None
    )
    for each in found:
        factors = [round(transfer.factor(each.line), 3) for transfer in each.transfers]
        sys.stdout.write(json.dumps({"factors": factors, **asdict(each)}, indent=1) + "\n")
