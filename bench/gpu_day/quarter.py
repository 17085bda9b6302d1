"""Parts of a quarter of an hour on a GPU: the doctor, steps of the services, and a plain loop."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.full_size.recipe import Shape, write_recipe
from bench.full_size.run import NAME
from bench.gpu_day.memory import model_folder, print_line
from bench.gpu_day.report import keep
from bench.gpu_day.services import MOST_GPUS, fluid
from bench.loop import as_plain, compare
from digenrl.local.processes.gpus import visible_gpus
from digenrl.local.processes.ports import free_ports
from digenrl.local.running.command_lines import command
from shared.errors import DigenRLError
from shared.recipe.recipe import load_recipe

if TYPE_CHECKING:
    from bench.gpu_day.day import Day

SHAPE = Shape(side=512, steps=4, groups=2, group_size=8, batches=100)
TINY_SHAPE = Shape(side=32, steps=3, groups=2, group_size=4, batches=100)
COMMITS = 7
"""Steps of the services until they are ended; the first ones meet shapes for the first time."""
NO_KL = {"algorithm.kl_beta": 0.0}
"""The plain loop has no reference policy, and the services are compared with it."""
ROUNDS = 4
PLAIN_ROWS = 8
POLL_S, STOP_S = 0.5, 20.0


def doctor(day: "Day") -> dict[str, Any]:
    """Returns what `digenrl doctor` finds of GPUs, and all that is wrong; the rest names paths."""
    argv = command("doctor", "--json", "--runs", str(day.folder / "runs"))
    ended = subprocess.run(argv, stdout=subprocess.PIPE, check=False)
    findings = json.loads(ended.stdout)
    wanted = [each for each in findings if each["check"] == "gpus" or each["state"] != "ok"]
    return {"findings": wanted}


def steady(day: "Day") -> dict[str, Any]:
    """Returns the seconds of steps, from commit to commit; ends the run after a few of them."""
    folder, shape = day.folder / "steady", TINY_SHAPE if day.tiny else SHAPE
    shutil.rmtree(folder / "runs", ignore_errors=True)  # of an attempt that failed
    gpus = 0 if day.cpu else min(MOST_GPUS, len(visible_gpus()))
    changes = fluid(gpus) | NO_KL
    recipe = write_recipe(folder, model_folder(day), shape, cpu=day.cpu, changes=changes)
    [port], runs = free_ports(1), folder / "runs"
    argv = command("up", str(recipe), "--fresh", "--runs", str(runs), "--run", NAME,
                   "--port", str(port))  # fmt: skip
    samples = shape.groups * shape.group_size
    found: dict[str, Any] = {"changes": changes, "samples": samples, "steps": []}
    began = time.time()
    process = subprocess.Popen(argv, env={**os.environ, "COLUMNS": "160"})
    try:
        while process.poll() is None and len(found["steps"]) < COMMITS:
            time.sleep(POLL_S)
            moments = [began, *sorted(commit_times(runs / NAME / "logs"))]
            found["steps"] = [b - a for a, b in pairwise(moments)]
            keep(day.folder, "services-steady", found)
    finally:
        process.terminate()
        process.wait(STOP_S)
    if len(found["steps"]) < COMMITS:
        raise DigenRLError("the run ended before its last step")
    return found


def commit_times(logs: Path) -> Iterator[float]:
    """Yields when the versions after the first were committed, in seconds since 1970."""
    for log in logs.glob("trainer-*.log"):
        for line in log.read_text().splitlines():
            if '"event": "committed"' in line and (entry := json.loads(line))["version"]:
                yield datetime.fromisoformat(entry["ts"]).timestamp()


def loop(day: "Day") -> dict[str, Any]:
    """Returns samples per second of a plain loop and of ours, after each round."""
    shape = TINY_SHAPE if day.tiny else SHAPE
    changes = NO_KL | {"trainer.micro_batch": shape.group_size}
    path = write_recipe(day.folder / "loop", model_folder(day), shape, cpu=day.cpu, changes=changes)
    found: dict[str, Any] = {}
    for compared in compare(load_recipe(path), ROUNDS, groups=1, plain_rows=PLAIN_ROWS):
        found = as_plain(compared)
        print_line(f"{len(compared.trainer)} of {ROUNDS} rounds")
        keep(day.folder, "loop", found)
    return found
