"""`digenrl export`: the adapter of a run's version, for other tools.

DIGENRL_STORE_URL names the run's object store, as for `digenrl report`.
"""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from digenrl.commands.options import RUNS, AsJson, RunArgument, RunOption, Runs, named

if TYPE_CHECKING:
    from digenrl.report.layouts import Layout

LAYOUTS = ("diffusers", "peft", "comfyui", "kohya")


def export(
    name: RunArgument = "",
    run: RunOption = "",
    layout: Annotated[
        str, typer.Option(help=f"key names of the files: {', '.join(LAYOUTS)}")
    ] = "diffusers",
    version: Annotated[
        int | None, typer.Option(min=0, help="version to export; by default the newest")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder; by default adapter-LAYOUT in the run's folder")
    ] = None,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Write the adapter of a run's version under the key names that other tools read."""
    from digenrl.local.store import store_of
    from digenrl.report.export_run import export_run
    from shared.telemetry import quiet_logs

    quiet_logs()
    wanted, chosen = named(name, run), _layout(layout)
    folder = out or runs / wanted / f"adapter-{chosen}"
    with store_of(runs / wanted):
        exported, paths = asyncio.run(export_run(wanted, folder, chosen, version))
    if as_json:
        said = {
            "run": wanted, "version": exported, "layout": chosen, "folder": str(folder),
            "files": [str(path) for path in paths],
        }  # fmt: skip
        typer.echo(json.dumps(said, indent=1))
        return
    for path in paths:
        typer.echo(path)


def _layout(name: str) -> "Layout":
    """Raises UserError if there is no such layout."""
    from shared.errors import UserError

    if name not in LAYOUTS:
        raise UserError(f"--layout: {name!r} is none; one of {', '.join(LAYOUTS)}")
    from digenrl.report.layouts import Layout

    return Layout(name)
