"""`python -m bench all`: every case of the performance tables, and the two devices.

Imported with the command line, so what is heavy is imported when it runs.
"""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from bench.cluster.suite import Planned

TWO_DEVICES_RECIPE = Path("recipes/digits.toml")


def command(
    quick: Annotated[bool, typer.Option("--quick", help="a few cases, in minutes")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="leave out cases whose results are there")
    ] = False,
    results: Annotated[Path, typer.Option(help="a JSON file per case goes here")] = Path(
        "bench/results"
    ),
    pictures: Annotated[Path, typer.Option(help="bars, timelines and tables go here")] = Path(
        "docs/performance"
    ),
    folder: Annotated[Path, typer.Option(help="for the brokers' data and logs")] = Path(
        "runs/bench-cluster"
    ),
) -> None:
    """Measure everything that the performance tables say. The machine should do nothing else."""
    from rich.console import Console

    from bench.cluster.suite import full
    from bench.cluster.suite import quick as few
    from bench.tables import read_results, tables

    console = Console(width=max(170, Console().width))
    cases = few() if quick else full()
    if resume:
        cases = [case for case in cases if not (results / f"{case.name}.json").is_file()]
    minutes = sum(case.seconds for case in cases) / 60
    console.print(f"{len(cases)} cases of the emulated cluster, about {minutes:.0f} minutes")
    asyncio.run(_run(cases, results, pictures, folder.resolve(), console))
    two_devices = results / "two-devices.json"
    if not (resume and two_devices.is_file()):
        _two_devices(two_devices, pictures, quick=quick)
    (pictures / "tables.md").write_text(tables(read_results(results)))


async def _run(
    cases: "list[Planned]", results: Path, pictures: Path, folder: Path, console: "Console"
) -> None:
    from bench.cluster.output import draw, show_case, write_json
    from bench.cluster.progress import run_in
    from bench.cluster.session import opened
    from bench.cluster.suite import planned

    console.print("planning all of them ...")
    plans = planned(cases)
    async with opened(folder) as session:
        for case, plan in zip(cases, plans, strict=True):
            finished = await run_in(session, plan, console)
            show_case(finished.result, console)
            write_json(results / f"{case.name}.json", finished.result)
            if case.pictures:
                draw(finished, pictures)


def _two_devices(path: Path, pictures: Path, *, quick: bool) -> None:
    """In a process of its own, which pins its children to cores."""
    length = ["--quick"] if quick else ["--rounds", "2"]
    options = ["--json", str(path), "--plot", str(pictures), *length]
    recipe = str(TWO_DEVICES_RECIPE)
    command = [sys.executable, "-m", "bench", "two-devices", recipe, *options]
    subprocess.run(command, check=True)
