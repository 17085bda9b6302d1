"""Whole runs: `digenrl up` as a user types it, in a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from digenrl.local.processes.ports import free_ports
from tests.e2e.local_run import SMALL, LocalRun, StartRun, recipe_of
from tests.e2e.surroundings import Surroundings, make_writable


@pytest.fixture
def small_recipe(tmp_path: Path) -> Path:
    return recipe_of(tmp_path, SMALL)


@pytest.fixture
def start_run(tmp_path: Path, small_recipe: Path) -> Iterator[StartRun]:
    """``start_run("--steps", "3", name="one")`` types `digenrl up` for the small recipe, in this
    place if one is given."""
    started: list[LocalRun] = []

    def start(
        *arguments: str,
        name: str = "small",
        recipe: Path = small_recipe,
        place: Surroundings | None = None,
    ) -> LocalRun:
        port = free_ports(1)[0]
        words = ("up", str(recipe), "--run", name, "--port", str(port), *arguments)
        command = [sys.executable, "-m", "digenrl", *words, "--runs", str(tmp_path / "runs")]
        folder, environment = tmp_path, None
        if place is not None:  # which has the recipe
            folder = recipe.parent
            command, environment = place.command(*words), place.variables(folder)
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            text=True,
            encoding="utf-8",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        run = LocalRun(process, folder / "runs" / name, f"http://127.0.0.1:{port}")
        started.append(run)
        return run

    yield start
    for run in started:
        if run.process.poll() is None:
            run.kill_everything()
        for joined in run.joined:
            joined.kill()
            joined.wait()
        if run.process.stdout is not None:
            run.process.stdout.close()
    make_writable(tmp_path)
