"""A run in progress is copied by a command that is killed again and again; the copy goes on as the
run does."""

import asyncio
import json
import multiprocessing
import os
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from digenrl.commands.cli import app
from shared.errors import UserError
from shared.run.commits import commit_chain
from shared.run.repair import find_damage
from shared.run.run_recipe import needed_recipe
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests.e2e.local_run import StartRun, wait_until
from tests.paths import ROOT

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(1800)]
NUM_KILLS = 20
NUM_AT_ONCE = 5
"""Kills as soon as an object is copied; the others come at random."""
PRELOADED = ["tests.e2e.test_copy", "digenrl.local.store", "shared.run.run_copy"]
MORE = 5
"""Steps of the copy, which the run takes as well."""


def digenrl(folder: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "digenrl", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, text=True, stdout=pipe, stderr=pipe)


def copy(folder: Path, store: str) -> None:
    """`digenrl copy small STORE`, in a process that has imported what it needs."""
    os.chdir(folder)
    app(["copy", "small", store])


def output(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def versions(store: ObjectStore) -> list[tuple[str, str, str]]:
    """What each version is, byte for byte: weights and optimizer state."""
    chain = asyncio.run(commit_chain(store, "small"))
    return [(each.policy.weights_digest, each.weights.sha256, each.checkpoint.sha256)
            for each in chain]  # fmt: skip


def is_whole(store: ObjectStore) -> bool:
    try:
        asyncio.run(needed_recipe(store, "small"))
    except UserError:
        return False
    return bool(versions(store))


def test_a_run_is_copied_as_it_trains_under_20_kills_and_the_copy_goes_on_byte_for_byte(
    start_run: StartRun, tmp_path: Path
) -> None:
    run = start_run("--steps", "2000", "--deterministic")
    run.wait_for(lambda view: view["step"] >= 2)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    trials = []
    for name in ("first", "second"):  # the first one starts the server that forks them
        began = time.monotonic()
        trial = context.Process(target=copy, args=(tmp_path, name))
        trial.start()
        trial.join()
        trials.append(time.monotonic() - began)
    chance, num_absent = random.Random(5), 0
    backup = ObjectStore(FolderBackend(tmp_path / "backup"))
    for number in range(NUM_KILLS):
        num_objects = len(asyncio.run(backup.keys("small")))
        copying = context.Process(target=copy, args=(tmp_path, "backup"))
        copying.start()
        if number < NUM_AT_ONCE:
            wait_until(lambda: len(asyncio.run(backup.keys("small"))) > num_objects, 300)  # noqa: B023
        else:
            copying.join(chance.uniform(0.05, 0.9) * trials[-1])
        copying.kill()
        copying.join()
        num_absent += not is_whole(backup)
    line = output(digenrl(tmp_path, "copy", "small", "backup"))
    version = len(versions(backup)) - 1
    assert line.startswith(f"small: version {version} is in backup, verified: ")
    assert num_absent > 0
    assert asyncio.run(find_damage(backup, "small")) == []
    run.wait_for(lambda view: view["step"] >= version + MORE)
    run.kill_everything()
    output(digenrl(tmp_path, "copy", "small", "original"))

    there, steps = tmp_path / "elsewhere", version + MORE
    there.mkdir()
    line = output(digenrl(there, "copy", str(tmp_path / "backup" / "small"), "runs"))
    assert f"small: version {version} is in runs" in line and "--resume` goes on with it" in line
    words = ("up", "runs/small/recipe.json", "--run", "small", "--resume", "--steps", str(steps))
    output(digenrl(there, *words))
    assert json.loads((there / "runs/small/summary.json").read_text())["commits"] == steps
    output(digenrl(there, "copy", "small", "resumed"))
    original = versions(ObjectStore(FolderBackend(tmp_path / "original")))
    assert versions(ObjectStore(FolderBackend(there / "resumed"))) == original[: steps + 1]


def commands(section: str) -> list[str]:
    """The commands of a section of the page about backups."""
    text = (
        (ROOT / "docs" / "upgrade.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    )
    return [line.partition(" #")[0] for line in text.splitlines() if line.startswith("digenrl ")]


def test_the_commands_of_the_page_back_a_run_up_and_restore_it(
    start_run: StartRun, tmp_path: Path
) -> None:
    start_run("--steps", "2", name="demo").finish()
    there = tmp_path / "another machine"
    there.mkdir()
    for folder, section in ((tmp_path, "Backup"), (there, "Restore")):
        assert len(commands(section)) >= 2
        for line in commands(section):
            words = shlex.split(line.replace("/mnt/backup", str(tmp_path / "backup")))[1:]
            output(digenrl(folder, *words))
    assert json.loads((there / "runs/demo/summary.json").read_text())["commits"] == 2
