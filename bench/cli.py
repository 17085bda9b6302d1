"""The commands of ``python -m bench``, which import what they need when they are called."""

import asyncio
import json
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.growth.commands import growth
from bench.learning.commands import learning, learning_services, learning_tables, shared_noise
from bench.spread.commands import spread

if TYPE_CHECKING:
    from rich.console import Console

    from bench.cluster.case import Case

bench = typer.Typer(help="Measure: schedules, devices, control.", no_args_is_help=True)
for command in (learning, learning_services, learning_tables, shared_noise, growth, spread):
    bench.command()(command)
MIN_COLUMNS = 170
PLAIN_ROWS = 9
"""Samples of a pass of the plain loop, in sampling and training: what Flow-GRPO's published
configuration of SD3.5-M takes, of 24 per prompt."""
TWO_DEVICES_RECIPE = Path("bench/learning/digits.toml")

JsonFile = Annotated[Path | None, typer.Option("--json", help="write figures here")]
Plot = Annotated[Path | None, typer.Option(help="draw bars and timelines here")]
ClusterFolder = Annotated[Path, typer.Option(help="for the brokers' data and logs")]
CLUSTER_FOLDER = Path("runs/bench-cluster")
Pairs = Annotated[int, typer.Option(min=1, help="pairs of runs, by turns")]
PairBatches = Annotated[int, typer.Option(min=1, help="of each run that are measured")]
PairDevices = Annotated[int, typer.Option(min=2, help="emulated H100s")]
DayFolder = Annotated[Path, typer.Option(help="for models, logs and what is found")]
DAY_FOLDER = Path("runs/gpu-day")


class Workload(StrEnum):
    qwen = "qwen-image"
    flux = "flux"
    wan = "wan"
    hunyuan = "hunyuan"


PairWorkload = Annotated[Workload, typer.Option(help="whose costs")]


class PartName(StrEnum):
    equal = "equal"
    slowed = "slowed"
    trainer_bound = "trainer-bound"


@bench.command("cluster")
def cluster(
    workload: Annotated[Workload, typer.Option(help="whose costs")] = Workload.qwen,
    devices: Annotated[int, typer.Option(min=2, help="equal H100s, if no --pool is given")] = 32,
    pool: Annotated[str | None, typer.Option(help="kind=count, e.g. h100=16,a100=16")] = None,
    split: Annotated[
        str | None, typer.Option(help="rollout:trainer, e.g. 8:24; by default each mode's best")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="with commas: sequential, gap, tsp, tag, one-step, colocated, help")
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
    json_file: JsonFile = None,
    plot: Plot = None,
    folder: ClusterFolder = CLUSTER_FOLDER,
) -> None:
    """Measure the real services over emulated devices, beside bounds, models and the simulator."""
    from dataclasses import asdict

    from bench.cluster.output import draw, run_shown, show_case
    from bench.cluster.request import Request, modes_of
    from bench.stored import write_result

    console = _console()
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
        write_result(json_file, asdict(finished.result))
    if plot is not None:
        draw(finished, plot)


@bench.command("protection")
def protection(
    rounds: Pairs = 5,
    batches: PairBatches = 4,
    devices: PairDevices = 32,
    workload: PairWorkload = Workload.qwen,
    folder: ClusterFolder = CLUSTER_FOLDER,
) -> None:
    """Measure what a user for each role and fsync cost: the same cluster with both and without."""
    from bench.protection import compare

    console, case = _console(), _one_case(workload, devices, rounds, batches)
    console.print(compare(case, folder.resolve(), console).line(), highlight=False)


@bench.command("reads")
def reads(
    rounds: Pairs = 5,
    batches: PairBatches = 4,
    devices: PairDevices = 32,
    workload: PairWorkload = Workload.qwen,
    folder: ClusterFolder = CLUSTER_FOLDER,
) -> None:
    """Measure what 50 reads of the API a second cost a run, and how long they take."""
    from bench.reads import compare

    console, case = _console(), _one_case(workload, devices, rounds, batches)
    console.print(compare(case, folder.resolve(), console).line(), highlight=False)


@bench.command("rows")
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
        asyncio.run(run_rows(chosen, length, results, folder.resolve(), _console()))


@bench.command("lost-host")
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
                _print(
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


@bench.command("forecasts")
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
    found = simulated(kept, _console().print)
    path.write_text(json.dumps(found, indent=1) + "\n")
    kept.unlink()


@bench.command("recipes")
def recipes() -> None:
    """Write the recipe of every row anew."""
    from bench.cluster.rows import RECIPES, ROWS, toml_of

    for old in RECIPES.glob("*.toml"):
        old.unlink()
    for row in ROWS:
        row.path.write_text(toml_of(row))


@bench.command("two-devices")
def two_devices(
    recipe: Annotated[Path, typer.Argument(help="for its model family, prompts and rewards")],
    part: Annotated[
        list[PartName] | None, typer.Option(help="which part; equal and slowed if none is named")
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
    measure(wanted, folder.resolve(), _console(), json_file=json_file, plots=plot)


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
    found = compare(override(load_recipe(recipe), changes), rounds, groups, plain_rows)
    show(found, _console())
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

    console, (wanted, length) = _console(), suite(quick=quick)
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


@bench.command("compare")
def compare(
    results: Annotated[Path, typer.Argument(help="folder of new results")] = Path(
        "runs/bench-quick"
    ),
) -> None:
    """Print what moved between the committed results and new ones."""
    from bench.drift import show_drift

    show_drift(results, _console())


@bench.command("handover")
def handover(
    run: Annotated[Path, typer.Argument(help="folder of a run that `digenrl up` has made")],
) -> None:
    """Print how fast devices changed hands in a run, from its logs."""
    from bench.handover import figures

    _print(figures(run))


@bench.command("unequal-workers")
def unequal_workers(
    slowdown: Annotated[float, typer.Option(min=1, help="of the second worker")] = 3.0,
    steps: Annotated[int, typer.Option(min=3, help="of the run")] = 10,
) -> None:
    """Print what a second, slower rollout worker adds to a run on the digits model."""
    from bench.unequal_workers import measure

    _print(measure(slowdown, steps))


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

    measure(model, folder.resolve(), _console(), out=out, json_file=json_file,
            limit_s=60 * minutes, tiny=tiny)  # fmt: skip


@bench.command("gpu-day")
def gpu_day(
    cpu: Annotated[bool, typer.Option("--cpu", help="rehearse on the CPU, with --tiny")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="tiny networks, in minutes")] = False,
    again: Annotated[bool, typer.Option("--again", help="also what was done before")] = False,
    part: Annotated[list[str] | None, typer.Option(help="only this part; repeatable")] = None,
    folder: DayFolder = DAY_FOLDER,
    out: Annotated[Path | None, typer.Option(help="the report goes into this folder")] = None,
) -> None:
    """Measure what needs a GPU, within an hour, and write one report; goes on where it was."""
    from bench.gpu_day.day import Day, run_day

    day = Day(folder.resolve(), cpu=cpu, tiny=tiny)
    out = out or (day.folder if tiny else Path("docs/gpu-day"))
    if not run_day(day, out, _console(), again=again, only=tuple(part or ())):
        raise typer.Exit(1)


@bench.command("gpu-day-part", hidden=True)
def gpu_day_part(
    name: str, folder: DayFolder = DAY_FOLDER, cpu: bool = False, tiny: bool = False
) -> None:
    """Do one part of it in this process."""
    from bench.gpu_day.day import Day, do_part

    do_part(name, Day(folder, cpu=cpu, tiny=tiny))


def _one_case(workload: Workload, devices: int, rounds: int, batches: int) -> "Case":
    """Return fragments streamed to emulated devices of one kind, without loans."""
    from bench.cluster.request import Request, modes_of

    request = Request(
        workload=workload.value, pool=f"h100={devices}", split=None, modes=modes_of("gap"),
        tag="off", gradient_help=False, fragment_size=None, rounds=rounds, batches=batches,
        one_step_batches=2, scale=None,
    )  # fmt: skip
    return request.case()


def _console() -> "Console":
    from rich.console import Console

    return Console(width=max(MIN_COLUMNS, Console().width))


def _print(figures: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
