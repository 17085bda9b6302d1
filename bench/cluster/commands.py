"""The commands of ``python -m bench`` that run the emulated cluster, or simulate it."""

import asyncio
import json
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from bench.cluster.case import Case

MIN_COLUMNS = 170
JsonFile = Annotated[Path | None, typer.Option("--json", help="write figures here")]
Plot = Annotated[Path | None, typer.Option(help="draw bars and timelines here")]
ClusterFolder = Annotated[Path, typer.Option(help="for the brokers' data and logs")]
CLUSTER_FOLDER = Path("runs/bench-cluster")
Pairs = Annotated[int, typer.Option(min=1, help="pairs of runs, by turns")]
PairBatches = Annotated[int, typer.Option(min=1, help="of each run that are measured")]
PairDevices = Annotated[int, typer.Option(min=2, help="emulated H100s")]


class Workload(StrEnum):
    qwen = "qwen-image"
    flux = "flux"
    wan = "wan"
    hunyuan = "hunyuan"


PairWorkload = Annotated[Workload, typer.Option(help="whose costs")]


def cluster(
    workload: Annotated[Workload, typer.Option(help="whose costs")] = Workload.qwen,
    devices: Annotated[int, typer.Option(min=2, help="equal H100s, if no --pool is given")] = 32,
    pool: Annotated[str | None, typer.Option(help="kind=count, e.g. h100=16,a100=16")] = None,
    split: Annotated[
        str | None, typer.Option(help="rollout:trainer, e.g. 8:24; by default each mode's best")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="with commas: sequential, gap, tsp, tag, one-step, colocated")
    ] = "all",
    tag: Annotated[
        str, typer.Option(help="groups that the trainer generates: planned, auto, off, a number")
    ] = "planned",
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
    json_file: JsonFile = None,
    plot: Plot = None,
    folder: ClusterFolder = CLUSTER_FOLDER,
) -> None:
    """Measure the real services over emulated devices, beside bounds, models and the simulator."""
    from dataclasses import asdict

    from bench.cluster.output import draw, run_shown, show_case
    from bench.cluster.request import Request, modes_of
    from bench.stored import write_result

    console = wide_console()
    request = Request(
        workload=workload.value,
        pool=pool or f"h100={devices}",
        split=split,
        modes=modes_of(mode),
        tag=tag,
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
        write_result(json_file, asdict(finished.result))
    if plot is not None:
        draw(finished, plot)


def protection(
    rounds: Pairs = 5,
    batches: PairBatches = 4,
    devices: PairDevices = 32,
    workload: PairWorkload = Workload.qwen,
    folder: ClusterFolder = CLUSTER_FOLDER,
) -> None:
    """Measure what a user for each role and fsync cost: the same cluster with both and without."""
    from bench.protection import compare

    console, case = wide_console(), _one_case(workload, devices, rounds, batches)
    console.print(compare(case, folder.resolve(), console).line(), highlight=False)


def reads(
    rounds: Pairs = 5,
    batches: PairBatches = 4,
    devices: PairDevices = 32,
    workload: PairWorkload = Workload.qwen,
    folder: ClusterFolder = CLUSTER_FOLDER,
) -> None:
    """Measure what 50 reads of the API a second cost a run, and how long they take."""
    from bench.reads import compare

    console, case = wide_console(), _one_case(workload, devices, rounds, batches)
    console.print(compare(case, folder.resolve(), console).line(), highlight=False)


def rows(
    name: Annotated[
        list[str] | None, typer.Argument(help="rows whose names begin so; all if none is named")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="runs of each row, by turns")] = 3,
    batches: Annotated[int, typer.Option(min=1, help="of each run that are measured")] = 3,
    one_step_batches: Annotated[int, typer.Option(min=2, help="the same one step ahead")] = 20,
    list_only: Annotated[bool, typer.Option("--list", help="only say how long each takes")] = False,
    results: Annotated[Path, typer.Option(help="a JSON file per row goes here")] = Path(
        "bench/results"
    ),
    folder: ClusterFolder = CLUSTER_FOLDER,
) -> None:
    """Measure rows of the tables: real services over emulated devices, each row by its recipe."""
    from bench.cluster.row_runs import Length, chosen_rows, run_rows
    from shared.errors import UserError

    length = Length(rounds=rounds, batches=batches, one_step_batches=one_step_batches)
    chosen = list(chosen_rows(name or ()))
    if not chosen:
        raise UserError(f"no row begins with {name}; python -m bench rows --list names all")
    for row in chosen if list_only else ():
        sys.stdout.write(f"{row.name}: about {length.seconds(row):.0f} s; {row.command}\n")
    if not list_only:
        asyncio.run(run_rows(chosen, length, results, folder.resolve(), wide_console()))


def lost_host(
    name: Annotated[str, typer.Argument(help="the row")] = "qwen-image-32-on-policy",
    scale: Annotated[float, typer.Option(min=1, help="times faster than real")] = 4.0,
    rounds: Annotated[int, typer.Option(min=1, help="runs")] = 3,
    folder: ClusterFolder = CLUSTER_FOLDER,
) -> None:
    """Measure what it costs that a host dies in the middle of a batch and comes back."""
    from bench.cluster.lost_host import measure
    from bench.cluster.rows import row_of
    from bench.cluster.session import opened

    case = row_of(name).case(rounds=rounds, batches=1, one_step_batches=2)
    setting = case.setting(case.modes[0], 0).model_copy(update={"scale": scale})

    async def measured() -> None:
        async with opened(folder.resolve()) as session:
            for number in range(rounds):
                found = await measure(session, setting.model_copy(update={"seed": number}))
                print_figures(
                    {
                        "row": name,
                        "scale": scale,
                        "usual_s": round(scale * found.usual_seconds, 2),
                        "killed_after_s": round(scale * found.lost_after, 2),
                        "lost_s": round(scale * found.lost_seconds, 2),
                        "lost_wall_s": round(found.lost_seconds, 2),
                        "batches_s": [round(scale * each, 2) for each in found.batch_seconds],
                    }
                )

    asyncio.run(measured())


def unscaled(
    batches: Annotated[int, typer.Option(min=2, help="that are measured, of about 130 s")] = 6,
    folder: ClusterFolder = CLUSTER_FOLDER,
) -> None:
    """Run Qwen-Image on a host of 8 emulated GPUs in real time, with every byte that it moves."""
    from bench.cluster.unscaled import measure

    figures = asyncio.run(measure(folder.resolve(), batches, wide_console().print))
    print_figures(figures)


def forecasts(
    path: Annotated[Path, typer.Option(help="a JSON file")] = Path("bench/results/forecasts.json"),
    resume: Annotated[
        bool, typer.Option("--resume", help="go on where this command was interrupted")
    ] = False,
    kept: Annotated[Path, typer.Option(help="what was found so far, until all is")] = Path(
        "runs/bench-forecasts.jsonl"
    ),
) -> None:
    """Simulate every row with the costs of the emulated cluster, and store it as forecasts."""
    from bench.cluster.forecasts import forecasts as simulated

    if not resume:
        kept.unlink(missing_ok=True)
    found = simulated(kept, wide_console().print)
    path.write_text(json.dumps(found, indent=1) + "\n")
    kept.unlink()


def recipes() -> None:
    """Write the recipe of every row anew."""
    from bench.cluster.rows import RECIPES, ROWS, UNSCALED, toml_of

    for old in RECIPES.glob("*.toml"):
        old.unlink()
    for row in (*ROWS, UNSCALED):
        row.path.write_text(toml_of(row))


def wide_console() -> "Console":
    """Return a console that the tables fit on."""
    from rich.console import Console

    return Console(width=max(MIN_COLUMNS, Console().width))


def _one_case(workload: Workload, devices: int, rounds: int, batches: int) -> "Case":
    """Return fragments streamed to emulated devices of one kind, without loans."""
    from bench.cluster.request import Request, modes_of

    request = Request(
        workload=workload.value, pool=f"h100={devices}", split=None, modes=modes_of("gap"),
        tag="off", fragment_size=None, rounds=rounds, batches=batches,
        one_step_batches=2, scale=None,
    )  # fmt: skip
    return request.case()


def print_figures(figures: Mapping[str, object]) -> None:
    """Write figures to standard output as JSON."""
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
