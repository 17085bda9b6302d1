"""`digenrl runs`: the runs of `digenrl up`, in progress or not."""

import json
import time
from dataclasses import asdict

import typer

from digenrl.commands.options import RUNS, AsJson, Runs
from digenrl.commands.tables import table


def runs(as_json: AsJson = False, runs: Runs = RUNS) -> None:
    """List all runs of `digenrl up`: state, step, reward, and how long ago each was started."""
    from digenrl.local.runs import RECIPE_JSON, read_progress, runs_in
    from digenrl.reading.wording import figure, time_left

    rows, listed = [], []
    for folder in runs_in(runs):
        now, age = read_progress(folder), time.time() - (folder / RECIPE_JSON).stat().st_mtime
        step = f"{now.step} of {now.steps}" if now.steps else str(now.step)
        reward = "" if now.reward is None else figure(now.reward)
        rows.append((folder.name, now.state, step, reward, time_left(age)))
        named = {"run": folder.name, "folder": str(folder.resolve())}
        listed.append({**named, **asdict(now), "age_seconds": age})
    if as_json:
        typer.echo(json.dumps(listed, indent=1))
        return
    table(("run", "state", "step", "reward", "age"), rows)
    if not rows:
        typer.echo(f"no runs in {runs}/")
