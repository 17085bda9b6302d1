"""Two recipes by turns through the real services: how much device time each needs to learn.

Every run is `digenrl up`, as a user types it, of a recipe that keeps every second version. Device
time is what the run's own usage records say (`<run>/usage`, of the scheduler): seconds in which a
rollout worker or the trainer generates, trains or commits, summed over devices and batches. The
versions are judged when the run is over, at fixed noise, so that this takes nothing from it.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.learning import figures
from bench.learning.case import EVERY, JUDGED, as_tables
from bench.learning.task import DIGITS, EVALUATED
from digenrl.evaluation.records import Evaluations
from digenrl.evaluation.settings import settings_digest
from digenrl.local.store import store_of
from services.scheduler.core.usage import BUSY, BatchUsage
from shared.errors import DigenRLError
from shared.learning.prompts import read_prompts
from shared.process.settings import ServiceSettings
from shared.recipe.recipe import Recipe, load_recipe
from shared.run.layout import usage_folder
from shared.store import open_store

GOAL = 0.95


def measure(recipes: Mapping[str, Path], seeds: Sequence[int], out: Path, folder: Path) -> None:
    """Runs each recipe with each seed, by turns, and writes a result per run into ``out``; what has
    its result is not run again."""
    for number, seed in enumerate(seeds):
        names = list(recipes)
        for name in names if number % 2 == 0 else reversed(names):
            path = out / f"{name}.{seed}.json"
            if not path.is_file():
                result = run_once(recipes[name], f"{name}-{seed}", seed, folder)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({"recipe": name, **result}, indent=1) + "\n")
            _say(json.dumps(of_run(json.loads(path.read_text()))))


def run_once(recipe: Path, name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Runs a recipe through the services, and judges its versions.

    Raises:
        DigenRLError: if a command fails.
    """
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"run": {"keep_every": EVERY}, **as_tables(EVALUATED)}
    path.write_text(json.dumps({"base": str(recipe.resolve()), **kept}))
    of = ("--runs", str(folder))
    began = time.monotonic()
    _digenrl("up", str(path), "--seed", str(seed), "--run", name, *of)
    seconds = time.monotonic() - began
    _digenrl("evaluate", name, "--every", str(EVERY), *of)
    resolved = load_recipe(path)
    with store_of(folder / name):
        evaluations = asyncio.run(_evaluations(resolved, name))
    summary = json.loads((folder / name / "summary.json").read_text())
    return {
        "seed": seed,
        "command_seconds": round(seconds, 1),
        "run_seconds": summary["wall_s"],
        "report_seconds": summary["report_s"],
        "seconds_per_step": summary["schedule"]["seconds_per_step"],
        "evaluations": evaluations,
    }


async def _evaluations(recipe: Recipe, name: str) -> list[dict[str, Any]]:
    store = open_store(ServiceSettings(run=name).store)
    settings = settings_digest(recipe, read_prompts(recipe.data.prompts))
    records = await Evaluations(store, name, settings).read_all()
    used = [
        BatchUsage.model_validate_json(await store.read(key) or b"")
        for key in await store.keys(usage_folder(name))
    ]
    size = recipe.batch.groups * recipe.batch.group_size
    return [
        {
            "version": each.version,
            "samples": each.version * size,
            "seconds": device_seconds(used, each.version),
            "height": DIGITS.height(each.quality),
            **{name: getattr(each.quality, field) for field, name in JUDGED.items()},
        }
        for each in records
    ]


def device_seconds(used: Sequence[BatchUsage], version: int) -> dict[str, float]:
    """Returns seconds that devices, but for those that score, were at work until a version was
    committed, by what they did."""
    found: dict[str, float] = {}
    for batch in used:
        for uses in batch.devices.values() if batch.batch < version else ():
            for use, seconds in uses.items():
                if use in BUSY - {"scoring"}:
                    found[use] = round(found.get(use, 0.0) + seconds, 3)
    return found


def of_run(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of one run."""
    kept = figures.guards(result)
    return {
        "recipe": result["recipe"],
        "seed": result["seed"],
        "device_seconds": figures.cost_of(result, GOAL, figures.seconds),
        "steps": figures.cost_of(result, GOAL, figures.steps),
        "base_nn": kept.base_nn,
        "largest_nn": kept.largest_nn,
        "smallest_div": kept.smallest_div,
        "worst_at_end": kept.worst_at_end,
        "gold": figures.at_end([result], "gold")[0],
        "svm": figures.at_end([result], "svm")[0],
        "command_seconds": result["command_seconds"],
    }


def compared(out: Path, old: str, new: str) -> dict[str, Any]:
    """Returns the medians of both recipes, and the ratio of their device seconds."""
    found = {name: list(_read(out, name)) for name in (old, new)}
    middles = {
        name: figures.middle(figures.costs(results, GOAL, figures.seconds))
        for name, results in found.items()
    }
    before, after = middles[old], middles[new]
    return {
        "device_seconds": middles,
        "ratio": None if before is None or after is None else after / before,
        "command_seconds": {
            name: median(each["command_seconds"] for each in results)
            for name, results in found.items()
        },
        "guards_hold": {
            name: all(figures.guards(each).hold() for each in results)
            for name, results in found.items()
        },
    }


def _read(out: Path, name: str) -> Iterator[dict[str, Any]]:
    for path in sorted(out.glob(f"{name}.*.json")):
        yield json.loads(path.read_text())


def _digenrl(*argv: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "digenrl", *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if ended.returncode:
        raise DigenRLError(f"digenrl {argv[0]}: {ended.stdout.decode(errors='replace')[-2000:]}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
