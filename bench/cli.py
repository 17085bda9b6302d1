"""The commands of ``python -m bench``, which import what they need when they are called."""

import asyncio
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cluster.commands import (
    CLUSTER_FOLDER,
    ClusterFolder,
    JsonFile,
    Plot,
    cluster,
    forecasts,
    lost_host,
    print_figures,
    protection,
    reads,
    recipes,
    rows,
    unscaled,
    wide_console,
)
from bench.digits.commands import digits, digits_edit
from bench.family_check.commands import check_family
from bench.growth.commands import growth
from bench.learning.commands import learning, learning_services, learning_tables, shared_noise
from bench.pictures.commands import pictures
from bench.simulation.commands import sim
from bench.spread.commands import far_runs, far_transfers, spread
from bench.tail_check.commands import tail_check

if TYPE_CHECKING:
    pass

bench = typer.Typer(help="Measure: schedules, devices, control.", no_args_is_help=True)
for command in (
    cluster, protection, reads, rows, lost_host, unscaled, forecasts, recipes,
    learning, learning_services, learning_tables, shared_noise, growth, spread,
    far_runs, far_transfers,
    digits, digits_edit, check_family, tail_check, sim, pictures,
):  # fmt: skip
    bench.command()(command)
PLAIN_ROWS = 9
"""Samples of a pass of the plain loop, in sampling and training: what Flow-GRPO's published
configuration of SD3.5-M takes, of 24 per prompt."""
TWO_DEVICES_RECIPE = Path("bench/learning/digits.toml")

DayFolder = Annotated[Path, typer.Option(help="for models, logs and what is found")]
DAY_FOLDER = Path("runs/gpu-day")


class PartName(StrEnum):
    equal = "equal"
    slowed = "slowed"


@bench.command("two-devices")
def two_devices(
    recipe: Annotated[Path, typer.Argument(help="for its model family, prompts and rewards")],
    part: Annotated[
        list[PartName] | None, typer.Option(help="which part; both if none is named")
    ] = None,
    mode: Annotated[
        list[str] | None, typer.Option(help="only this mode, as the table names it; repeatable")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="runs of each mode")] = 3,
    batches: Annotated[int, typer.Option(min=1, help="of each run that are measured")] = 3,
    slowdown: Annotated[float, typer.Option(min=1, help="of the slowed device")] = 3.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="one round of few modes and small batches")
    ] = False,
    json_file: JsonFile = None,
    plot: Plot = None,
    folder: Annotated[Path, typer.Option(help="for the model and the logs")] = Path(
        "runs/bench-two-devices"
    ),
) -> None:
    """Measure what each scheduling technique gains on two CPU cores, each one device."""
    from bench.two_devices.study import Wanted, measure

    wanted = Wanted(
        recipe=recipe,
        parts=tuple(name.value for name in part or (PartName.equal, PartName.slowed)),
        modes=tuple(mode or ()),
        rounds=rounds,
        batches=batches,
        slowdown=slowdown,
        quick=quick,
    )
    measure(wanted, folder.resolve(), wide_console(), json_file=json_file, plots=plot)


@bench.command("loop")
def loop(
    recipe: Annotated[Path, typer.Argument(help="for its model, sampling and batch")],
    rounds: Annotated[int, typer.Option(min=1, help="of each, by turns")] = 9,
    groups: Annotated[int, typer.Option(min=1, help="of each round")] = 4,
    plain_rows: Annotated[
        int, typer.Option(min=1, help="samples per pass of the plain loop")
    ] = PLAIN_ROWS,
    json_file: JsonFile = None,
) -> None:
    """Compare our rollout and trainer with a plain loop that trains step by step."""
    from bench.loop import as_plain, compare, show
    from bench.stored import write_result
    from shared.recipe.recipe import load_recipe, override

    # The plain loop has no KL term, and the policy gradient is what both are known for.
    changes = {"algorithm.name": "flow-grpo", "algorithm.kl_beta": 0.0}
    *_, found = compare(override(load_recipe(recipe), changes), rounds, groups, plain_rows)
    show(found, wide_console())
    if json_file is not None:
        write_result(json_file, as_plain(found))


@bench.command("all")
def everything(
    quick: Annotated[
        bool, typer.Option("--quick", help="a few cases, in minutes, beside the committed results")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="leave out cases whose results are there")
    ] = False,
    results: Annotated[Path, typer.Option(help="a JSON file per case goes here")] = Path(
        "bench/results"
    ),
    pictures: Annotated[Path, typer.Option(help="bars, timelines and tables go here")] = Path(
        "docs/performance"
    ),
    folder: ClusterFolder = CLUSTER_FOLDER,
) -> None:
    """Measure everything that the performance tables say. The machine should do nothing else."""
    from bench.cluster.row_runs import run_rows
    from bench.cluster.suite import suite
    from bench.drift import show_drift
    from bench.stored import TWO_DEVICES

    console, (wanted, length) = wide_console(), suite(quick=quick)
    if resume:
        wanted = [row for row in wanted if not (results / f"{row.name}.json").is_file()]
    minutes = sum(length.seconds(row) for row in wanted) / 60
    console.print(f"{len(wanted)} rows of the emulated cluster, about {minutes:.0f} minutes")
    asyncio.run(run_rows(wanted, length, results, folder.resolve(), console))
    path = results / f"{TWO_DEVICES}.json"
    if not (resume and path.is_file()):
        two_devices(
            TWO_DEVICES_RECIPE, rounds=3 if quick else 2, quick=quick, json_file=path, plot=pictures
        )
    if quick:
        show_drift(results, console)
    else:
        write_tables(results)


@bench.command("tables")
def write_tables(
    results: Annotated[Path, typer.Argument(help="folder of results")] = Path("bench/results"),
) -> None:
    """Write the tables of results that are there already into the pages that have them."""
    from bench.tables import known_of, pages

    for page, text in pages(Path(), known_of(results)).items():
        page.write_text(text)


@bench.command("lines")
def write_lines() -> None:
    """Simulate sites behind lines, and write the table of docs/far-apart.md."""
    from bench.lines import write

    write()


@bench.command("compare")
def compare(
    results: Annotated[Path, typer.Argument(help="folder of new results")] = Path(
        "runs/bench-quick"
    ),
) -> None:
    """Print what moved between the committed results and new ones."""
    from bench.drift import show_drift

    show_drift(results, wide_console())


@bench.command("handover")
def handover(
    run: Annotated[Path, typer.Argument(help="folder of a run that `digenrl up` has made")],
) -> None:
    """Print how fast devices changed hands in a run, from its logs."""
    from bench.handover import figures

    print_figures(figures(run))


@bench.command("unequal-workers")
def unequal_workers(
    slowdown: Annotated[float, typer.Option(min=1, help="of the second worker")] = 3.0,
    steps: Annotated[int, typer.Option(min=3, help="of the run")] = 10,
) -> None:
    """Print what a second, slower rollout worker adds to a run on the digits model."""
    from bench.unequal_workers import measure

    print_figures(measure(slowdown, steps))


@bench.command("full-size")
def full_size(
    model: Annotated[Path, typer.Option(help="folder for random weights of SD3.5-M, 6.4 GB; kept")],
    folder: Annotated[Path, typer.Option(help="for the run, its recipe and its logs")] = Path(
        "runs/full-size"
    ),
    out: Annotated[Path | None, typer.Option(help="write the report here, as Markdown")] = None,
    json_file: JsonFile = None,
    minutes: Annotated[float, typer.Option(min=1, help="limit of the whole run")] = 60,
    tiny: Annotated[bool, typer.Option("--tiny", help="a tiny network, to try it out")] = False,
) -> None:
    """Train SD3.5-M at full size with random weights on the CPU: one group of two samples."""
    from bench.full_size.on_cpu import measure

    measure(model, folder.resolve(), wide_console(), out=out, json_file=json_file,
            limit_s=60 * minutes, tiny=tiny)  # fmt: skip


@bench.command("gpu-day")
def gpu_day(
    cpu: Annotated[bool, typer.Option("--cpu", help="rehearse on the CPU, with --tiny")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="tiny networks, in minutes")] = False,
    again: Annotated[bool, typer.Option("--again", help="also what was done before")] = False,
    part: Annotated[list[str] | None, typer.Option(help="only this part; repeatable")] = None,
    quarter: Annotated[
        bool, typer.Option("--quarter", help="only what matters most, within --minutes")
    ] = False,
    minutes: Annotated[float, typer.Option(min=1, help="limit of a --quarter, start included")] = 8,
    folder: DayFolder = DAY_FOLDER,
    out: Annotated[Path | None, typer.Option(help="the report goes into this folder")] = None,
) -> None:
    """Measure what needs a GPU, within two hours, and write one report; goes on where it was."""
    from bench.gpu_day.day import RESERVE_S, Day, process_age, run_day

    left = minutes - process_age() / 60
    for each in (signal.SIGTERM, signal.SIGALRM):  # the part that runs is ended as well
        signal.signal(each, lambda signum, _: sys.exit(128 + signum))
    if quarter:
        signal.setitimer(signal.ITIMER_REAL, max(1.0, 60 * left - RESERVE_S))
    day = Day(folder.resolve(), cpu=cpu, tiny=tiny, quarter=left if quarter else 0)
    out = out or (day.folder if tiny else Path("docs/gpu-day"))
    if not run_day(day, out, wide_console(), again=again, only=tuple(part or ())):
        raise typer.Exit(1)


@bench.command("gpu-day-part", hidden=True)
def gpu_day_part(
    name: str, folder: DayFolder = DAY_FOLDER, cpu: bool = False, tiny: bool = False
) -> None:
    """Do one part of it in this process."""
    from bench.gpu_day.day import Day, do_part

    do_part(name, Day(folder, cpu=cpu, tiny=tiny))
