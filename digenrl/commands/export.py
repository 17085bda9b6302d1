"""`digenrl export`: the adapter of a run's version, for other tools.

DIGENRL_STORE_URL names the run's object store, as for `digenrl report`.
"""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from digenrl.commands.options import RUNS, AsJson, RunArgument, RunOption, Runs
from digenrl.local.runs import find_run

if TYPE_CHECKING:
    from digenrl.report.export_run import WantedVersion

Layouts = Literal["diffusers", "peft", "comfyui", "kohya"]


def export(
    name: RunArgument = "",
    run: RunOption = "",
    layout: Annotated[Layouts, typer.Option(help="key names of the files")] = "diffusers",
    version: Annotated[
        str, typer.Option(help="number of the version to export; newest, or best by its evaluation")
    ] = "newest",
    out: Annotated[
        Path | None, typer.Option(help="folder; by default adapter-LAYOUT in the run's folder")
    ] = None,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Write an adapter under the key names that other tools read, of any version of a run.

    Examples: `digenrl export demo`, `digenrl export demo --version best --layout comfyui`. The run
    may be in progress.
    """
    from digenrl.local.store import run_store
    from digenrl.report.export_run import export_run
    from digenrl.report.layouts import Layout
    from shared.telemetry import quiet_logs

    quiet_logs()
    number = parse_version(version)
    target = find_run(name or run, runs, reads=True)
    folder = out or target.folder / f"adapter-{layout}"
    if not as_json:
        which = f"{version} version" if isinstance(number, str) else f"version {version}"
        typer.echo(f"exports the {which} of {target.name} ...", err=True)
    with run_store(target, reads=True):
        exported = asyncio.run(export_run(target.id, folder, Layout(layout), number))
    if as_json:
        result = {
            "run": target.name, "version": exported.version, "layout": layout,
            "folder": str(folder),
            "files": [str(path) for path in exported.files],
        }  # fmt: skip
        typer.echo(json.dumps(result, indent=1))
        return
    typer.echo(f"version {exported.version} ({exported.figure})", err=True)
    for path in exported.files:
        typer.echo(path)
    trial = target.command("generate", "--adapter", str(folder), *exported.example)
    typer.echo(f"try it: {trial}", err=True)


def parse_version(text: str) -> "WantedVersion":
    """Raises UserError if the text names no version."""
    from shared.errors import UserError

    words: dict[str, WantedVersion] = {"best": "best", "newest": "newest"}
    if text in words:
        return words[text]
    if not text.isdecimal():
        raise UserError(f"--version: {text!r} is not a version; use best, newest or a number")
    return int(text)
