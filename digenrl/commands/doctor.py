"""`digenrl doctor`: problems of this machine that would keep a run from working, and how to fix
them."""

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands.options import RUNS, AsJson, Runs, settings_from_options


def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(help="a recipe that is to run here as well")
    ] = None,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Look at this machine and at the brokers that DIGENRL_... names; end with 1 if something is
    wrong."""
    from digenrl.local.checking.doctor import local_findings, recipe_finding, service_findings
    from shared.telemetry import quiet_logs

    quiet_logs()
    findings = list(local_findings(runs))
    if recipe is not None:
        findings.append(recipe_finding(recipe))
    if not any(each.check == "secrets" and each.state == "fault" for each in findings):
        settings = settings_from_options(run=os.environ.get("DIGENRL_RUN", "doctor"))
        findings += asyncio.run(service_findings(settings))
    if as_json:
        typer.echo(json.dumps([each.as_dict() for each in findings], indent=1))
    else:
        for each in findings:
            typer.echo(each.line())
    raise typer.Exit(int(any(each.state == "fault" for each in findings)))
