"""`python -m bench check-family`: whether an adapter is its pipeline in diffusers."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands.options import AsJson
from shared.errors import DigenRLError, UserError


def check_family(
    name: Annotated[
        str, typer.Argument(help="name of the pipeline; `digenrl families` lists them")
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            help="folder with a small model of the family; by default the one of its package"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a model family's adapter with its own pipeline: the same samples without noise, the
    ratio 1 of a replay, a gradient in each adapted layer, the cost of a step. Exits with 1 if
    something is wrong, and names it."""
    from bench.family_check.check import check_model
    from shared.models.plugins import TINY_MODEL_GROUP, brought, family_named, known_pipelines
    from shared.telemetry import quiet_logs

    quiet_logs()
    if family_named(name) is None:
        raise UserError(f"NAME: no family {name!r}; known are: {', '.join(known_pipelines())}")
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            tiny = brought(TINY_MODEL_GROUP).get(name)
            if tiny is None:
                raise UserError(
                    f"--model: name a folder with a small {name}; no package brings one "
                    f"({TINY_MODEL_GROUP})"
                )
            tiny.load()(Path(folder))
        report = check_model(name, model or Path(folder))
    typer.echo(report.model_dump_json(indent=1) if as_json else "\n".join(report.lines))
    if report.mistakes:
        raise DigenRLError(f"{name}: {len(report.mistakes)} mistakes")
