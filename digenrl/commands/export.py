"""`digenrl export`: the adapter of a run's version, for other tools.

DIGENRL_STORE_URL names the run's object store, as for `digenrl report`.
"""

import asyncio
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from digenrl.commands.options import RUNS, AsJson, RunArgument, RunOption, Runs
from digenrl.local.runs import find_run

if TYPE_CHECKING:
    from digenrl.report.export_run import Wanted
    from digenrl.report.layouts import Layout

LAYOUTS = ("diffusers", "peft", "comfyui", "kohya")


def export(
    name: RunArgument = "",
    run: RunOption = "",
    layout: Annotated[
        str, typer.Option(help=f"key names of the files: {', '.join(LAYOUTS)}")
    ] = "diffusers",
    version: Annotated[
        str,
        typer.Option(help="number of the version to export; newest, or best by its evaluation"),
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
    from digenrl.local.store import store_of
    from digenrl.report.export_run import export_run
    from shared.telemetry import quiet_logs

    quiet_logs()
    chosen, number = _layout(layout), _version(version)
    found = find_run(name or run, runs, reads=True)
    folder = out or found.folder / f"adapter-{chosen}"
    if not as_json:
        which = f"{version} version" if isinstance(number, str) else f"version {version}"
        typer.echo(f"exports the {which} of {found.name} ...", err=True)
    with store_of(found, reads=True):
        exported = asyncio.run(export_run(found.id, folder, chosen, number))
    if as_json:
        said = {
            "run": found.name, "version": exported.version, "layout": chosen, "folder": str(folder),
            "files": [str(path) for path in exported.files],
        }  # fmt: skip
        typer.echo(json.dumps(said, indent=1))
        return
    typer.echo(f"version {exported.version} ({exported.figure})", err=True)
    for path in exported.files:
        typer.echo(path)
    typer.echo(f"try it: {_trial(found.folder, folder, exported.prompt)}", err=True)


def _trial(run: Path, adapter: Path, prompt: str | None) -> str:
    """Return the command that makes samples with an adapter, as it is typed."""
    from digenrl.local.record import STARTED_JSON

    try:
        recipe = json.loads((run / STARTED_JSON).read_text())["recipe"]
    except (OSError, ValueError, KeyError):
        recipe = "RECIPE"
    words = ["digenrl", "generate", recipe, "--adapter", str(adapter), "--num", "4"]
    words += ["--prompt", prompt or "PROMPT", "--out", f"{adapter}-samples"]
    return shlex.join(words)


def _version(text: str) -> "Wanted":
    """Raises UserError if the text names no version."""
    from shared.errors import UserError

    words: dict[str, Wanted] = {"best": "best", "newest": "newest"}
    if text in words:
        return words[text]
    if not text.isdecimal():
        raise UserError(f"--version: {text!r} is none of best, newest and a number")
    return int(text)


def _layout(name: str) -> "Layout":
    """Raises UserError if there is no such layout."""
    from shared.errors import UserError

    if name not in LAYOUTS:
        raise UserError(f"--layout: {name!r} is none; one of {', '.join(LAYOUTS)}")
    from digenrl.report.layouts import Layout

    return Layout(name)
