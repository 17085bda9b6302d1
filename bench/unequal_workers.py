"""Two rollout workers of unequal speed on the digits model, against the bound for that pair.

Starts a run with one worker, lets a second one join that generates several times slower, and
prints how soon it had work, the median batch, and the bound: all samples over the sum of both
measured speeds. Batches are made of long rollouts, so that the trainer is not the bottleneck.
"""

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench import FROM_CLONE, ROOT
from digenrl.local.processes.ports import free_ports
from digenrl.local.secrets.tokens import KEYS
from shared.recipe.recipe import load_recipe, override

DIGITS = ROOT / "bench" / "learning" / "digits.toml"
CHANGES = {
    "sampling.steps": 40, "sampling.window": 1, "schedule.tsp_steps": 1, "schedule.tag": "off",
    "schedule.fragment_size": "auto", "evaluation.samples_per_prompt": 1,
}  # fmt: skip


class Run:
    def __init__(self, folder: Path, steps: int) -> None:
        recipe = override(load_recipe(DIGITS), CHANGES)
        self.samples = recipe.batch.groups * recipe.batch.group_size
        path = folder / "recipe.json"
        path.write_text(recipe.model_dump_json())
        port = free_ports(1)[0]
        self.keys = folder / "unequal" / KEYS
        self.url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable, "-m", "digenrl", "up", str(path), "--fresh", "--steps", str(steps),
            "--run", "unequal", "--runs", str(folder), "--port", str(port),
            "--rollout.workers", "1",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def get(self, path: str) -> Any:
        try:
            token = (self.keys / "viewer.token").read_text().strip()
            headers = {"authorization": f"Bearer {token}"}
            return httpx.get(f"{self.url}{path}", timeout=5, headers=headers).json()
        except (httpx.HTTPError, OSError):
            return None

    def add_worker(self, name: str, slowdown: float) -> "subprocess.Popen[bytes]":
        [first] = [c for c in psutil.Process(self.process.pid).children()
                   if "rollout-0" in c.cmdline()]  # fmt: skip
        command = [
            sys.executable, "-m", "bench.slowed", str(slowdown), "--run", "unequal",
            "--worker", name, "--port", str(free_ports(1)[0]),
        ]  # fmt: skip
        # A service that was forked shows the environment of the process that it is a copy of.
        role = {"DIGENRL_SECRETS_DIR": str(self.keys / "rollout")}
        environment = {**os.environ, **first.environ(), **FROM_CLONE, **role}
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


def watch(run: Run) -> tuple[float | None, list[float], dict[str, float]]:
    """Returns seconds from joining to having work, times of commits, and seconds per sample."""
    joined = worked = None
    commits: list[float] = []
    speeds: dict[str, float] = {}
    step = -1
    while run.process.poll() is None:
        view, workers = run.get("/v1/run"), run.get("/v1/workers") or []
        slow = next((w for w in workers if w["worker"] == "slow"), None)
        if slow is not None:
            joined = joined or time.monotonic()
            if slow["num_in_hand"] and worked is None:
                worked = time.monotonic()
            speeds = {w["worker"]: w["seconds_per_sample"] for w in workers
                      if w["service"] == "rollout"}  # fmt: skip
        if view is not None and view["step"] != step:
            step = view["step"]
            commits.append(time.monotonic())
        time.sleep(0.02)
    since = None if joined is None or worked is None else worked - joined
    return since, [t for t in commits if joined and t > joined], speeds


def measure(slowdown: float, steps: int) -> dict[str, object]:
    """Runs both workers and returns the figures."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), steps)
        while (view := run.get("/v1/run")) is None or view["step"] < 1:
            time.sleep(0.1)
        slow = run.add_worker("slow", slowdown)
        since, commits, speeds = watch(run)
        slow.kill()
    batches = [after - before for before, after in itertools.pairwise(commits[1:])]
    bound = run.samples / sum(1 / seconds for seconds in speeds.values())
    return {
        "joined_to_work_s": since,
        "seconds_per_sample": speeds,
        "batches": len(batches),
        "median_batch_s": statistics.median(batches),
        "bound_s": bound,
        "of_the_bound": bound / statistics.median(batches),
    }
