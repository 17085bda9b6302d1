"""`digenrl repair`: finds damaged objects in a stopped run's store, and repairs the run."""

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from digenrl.commands.options import RUNS, AsJson, RunOption, Runs, RunToChange
from digenrl.local.runs import find_run

if TYPE_CHECKING:
    from shared.run.repair import DamagedObject

REPORT_FIELDS = {"key": "key", "what": "fault", "remedy": "remedy", "then": "consequence"}
"""Key of the JSON output -> field of `DamagedObject`."""


def repair(
    name: RunToChange = "",
    run: RunOption = "",
    apply: Annotated[
        bool, typer.Option("--apply", help="repair the run; without this, only list the repairs")
    ] = False,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Read all stored objects of a stopped run, and report damaged ones; with --apply, move them to
    the run's quarantine, and restore known content. Exits with 1 if something is left."""
    from digenrl.evaluation.records import EvaluationRecord
    from digenrl.local.store import run_store
    from services.scheduler.sim.staleness import StalenessDecision
    from shared.run.repair import apply_remedy, find_damage
    from shared.run.usage import BatchUsage

    chosen = find_run(name or run, runs)
    with run_store(chosen) as store:
        models = {
            r"usage/.*": BatchUsage.model_validate_json,
            r"staleness\.json": StalenessDecision.model_validate_json,
            r"evaluations/[^/]+/records/.*": EvaluationRecord.model_validate_json,
        }
        damage = asyncio.run(find_damage(store, chosen.id, models))
        _show(damage, apply=apply, as_json=as_json)
        if not damage:
            return
        if not apply:
            raise typer.Exit(1)

        async def apply_remedies() -> None:
            for each in damage:
                await apply_remedy(store, chosen.id, each)

        asyncio.run(apply_remedies())
        num_left = sum(each.remedy == "none" for each in damage)
        quarantine = f"{chosen.id}/quarantine"
        if not as_json:
            num_repaired = len(damage) - num_left
            typer.echo(f"repaired {num_repaired} objects; the damaged ones are in {quarantine}")
        if num_left:
            raise typer.Exit(1)


def _show(damage: "Sequence[DamagedObject]", *, apply: bool, as_json: bool) -> None:
    if as_json:
        rows = [
            {key: getattr(each, name) for key, name in REPORT_FIELDS.items()} for each in damage
        ]
        typer.echo(json.dumps(rows, indent=1))
        return
    for each in damage:
        typer.echo(f"{each.key}: {each.fault}")
        typer.echo(f"    {each.remedy if each.remedy != 'none' else 'by hand'}: {each.consequence}")
    if not damage:
        typer.echo("nothing is damaged")
    elif not apply:
        typer.echo("nothing was changed; --apply repairs the run")
