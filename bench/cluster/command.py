"""`python -m bench cluster`: from its options to tables, figures and pictures.

Imported with the command line, so what is heavy is imported when it runs.
"""

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Workload(StrEnum):
    qwen = "qwen-image"
    flux = "flux"
    wan = "wan"
    hunyuan = "hunyuan"


def command(
    workload: Annotated[Workload, typer.Option(help="whose costs")] = Workload.qwen,
    devices: Annotated[int, typer.Option(min=2, help="equal H100s, if no --pool is given")] = 32,
    pool: Annotated[str | None, typer.Option(help="kind=count, e.g. h100=16,a100=16")] = None,
    split: Annotated[
        str | None, typer.Option(help="rollout:trainer, e.g. 8:24; by default each mode's best")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="with commas: naive, gap, tsp, tag, one-step, colocated, help")
    ] = "all",
    tag: Annotated[
        str, typer.Option(help="groups that the trainer generates: planned, auto, off, a number")
    ] = "planned",
    gradient_help: Annotated[
        bool, typer.Option(help="rollout devices train for a trainer that is behind")
    ] = False,
    fragment_size: Annotated[
        int | None, typer.Option(min=1, help="samples; by default each mode's best")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="runs of each mode, by turns")] = 2,
    batches: Annotated[int, typer.Option(min=1, help="of each run that are measured")] = 3,
    one_step_batches: Annotated[
        int, typer.Option(min=2, help="the same with one-step asynchrony, better many")
    ] = 12,
    scale: Annotated[
        float | None,
        typer.Option(min=1, help="times faster than real; by default about 4 s a batch"),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write figures here")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw bars and timelines here")] = None,
    folder: Annotated[Path, typer.Option(help="for the brokers' data and logs")] = Path(
        "runs/bench-cluster"
    ),
) -> None:
    """Measure the real services over emulated devices, beside bounds, models and the simulator."""
    from rich.console import Console

    from bench.cluster.output import draw, show_case, write_json
    from bench.cluster.progress import run_shown
    from bench.cluster.request import Request, modes_of

    console = Console(width=max(170, Console().width))
    request = Request(
        workload=workload.value,
        pool=pool or f"h100={devices}",
        split=split,
        modes=modes_of(mode),
        tag=tag,
        gradient_help=gradient_help,
        fragment_size=fragment_size,
        rounds=rounds,
        batches=batches,
        one_step_batches=one_step_batches,
        scale=scale,
    )
    with console.status("planning splits"):
        case = request.case()
    finished = asyncio.run(run_shown(case, folder.resolve(), console))
    show_case(finished.result, console)
    if json_file is not None:
        write_json(json_file, finished.result)
    if plot is not None:
        draw(finished, plot)
