"""`digenrl runs`: the runs of `digenrl up`, in progress or not."""

import json
import time

import typer

from digenrl.commands.options import RUNS, AsJson, Runs
from digenrl.commands.tables import table


def runs(as_json: AsJson = False, runs: Runs = RUNS) -> None:
    """List all runs of `digenrl up`: state, step, reward, and how long ago each was started."""
    from digenrl.local.progress import progress_of
    from digenrl.local.runs import RECIPE_JSON, runs_in
    from digenrl.view.words import figure, time_left

    found = [(each, progress_of(each)) for each in runs_in(runs)]
    ages = [time.time() - (each / RECIPE_JSON).stat().st_mtime for each, _ in found]
    if as_json:
        listed = [
            {
                "run": each.name, "folder": str(each.resolve()), "state": now.state,
                "step": now.step, "steps": now.steps, "reward": now.reward, "age_seconds": age,
            }
            for (each, now), age in zip(found, ages, strict=True)
        ]  # fmt: skip
        typer.echo(json.dumps(listed, indent=1))
        return
    rows = [
        (
            each.name, now.state, f"{now.step}{f' of {now.steps}' if now.steps else ''}",
            "" if now.reward is None else figure(now.reward), time_left(age),
        )
        for (each, now), age in zip(found, ages, strict=True)
    ]  # fmt: skip
    table(("run", "state", "step", "reward", "age"), rows)
    if not found:
        typer.echo(f"no runs in {runs}/")
