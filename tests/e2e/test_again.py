"""A run that is typed again, kept, listed and detached: real runs of the small recipe."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from digenrl.local.runs import RECIPE_JSON
from tests.e2e.local_run import PATIENCE_S, StartRun, wait_until

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(1500)]


def digenrl(*arguments: str, runs: Path) -> str:
    """Type a command; returns what it prints."""
    ended = subprocess.run(
        [sys.executable, "-m", "digenrl", *arguments], capture_output=True, text=True, check=False,
        env=os.environ | {"DIGENRL_RUNS": str(runs)}, timeout=PATIENCE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_run_that_is_typed_again_goes_on_and_a_finished_one_stays_reachable(
    start_run: StartRun, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    first = start_run("--steps", "60")
    first.wait_for(lambda view: view["step"] >= 2)
    assert [each["state"] for each in json.loads(digenrl("runs", "--json", runs=runs))] == [
        "running"
    ]
    first.kill_everything()
    [listed] = json.loads(digenrl("runs", "--json", runs=runs))
    assert (listed["run"], listed["state"], listed["steps"]) == ("small", "interrupted", 60)
    step = listed["step"]
    second = start_run("--steps", str(step + 1))
    output, _ = second.process.communicate(timeout=PATIENCE_S)
    assert second.process.returncode == 0, output
    line, *_ = output.splitlines()
    assert line.startswith(f"run small is not finished (interrupted at step {step} of 60)")
    summary = json.loads((second.folder / "summary.json").read_text())
    assert summary["commits"] == step + 1
    third = start_run("--steps", "1", "--seed", "3")
    output, _ = third.process.communicate(timeout=PATIENCE_S)
    assert output.splitlines()[0] == (
        f"run small: the earlier one (finished at step {step + 1} of {step + 1}) is kept as small.1"
    )
    names = [line.split()[:2] for line in digenrl("runs", runs=runs).splitlines()]
    assert names == [["run", "state"], ["small", "finished"], ["small.1", "finished"]]
    assert f"step {step + 1} of {step + 1}" in digenrl("status", "small.1", runs=runs)
    assert "step 1 of 1" in digenrl("status", runs=runs)
    assert digenrl("versions", "small.1", runs=runs).count("\n") >= step + 2
    assert (runs / "small.1" / "adapter-diffusers").exists() is False
    digenrl("export", "small.1", runs=runs)
    assert any((runs / "small.1" / "adapter-diffusers").iterdir())
    digenrl("report", str(runs / "small.1"), runs=runs)
    digenrl("logs", "small.1", runs=runs)
    typed = [sys.executable, "-m", "digenrl", "pause", "small.1"]
    paused = subprocess.run(
        typed, capture_output=True, text=True, check=False,
        env=os.environ | {"DIGENRL_RUNS": str(runs)},
    )  # fmt: skip
    assert paused.returncode == 2
    assert paused.stderr.startswith("digenrl: RUN: small.1 is not in progress: finished at step ")
    kept = runs / "small.1" / RECIPE_JSON
    more = start_run("--resume", "--steps", str(step + 2), name="small.1", recipe=kept)
    more.folder = runs / "small.1"
    output, _ = more.process.communicate(timeout=PATIENCE_S)
    assert more.process.returncode == 0, output
    assert json.loads((more.folder / "summary.json").read_text())["commits"] == step + 2


def test_a_detached_run_outlives_its_terminal_and_says_how_to_go_on(
    small_recipe: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    typed = ["up", str(small_recipe), "--run", "away", "--steps", "3000", "--detach"]
    shell, terminal = os.forkpty()
    if shell == 0:  # as sshd starts a shell: it leads a session with a terminal
        os.environ["DIGENRL_RUNS"] = str(runs)
        os.execv(sys.executable, [sys.executable, "-m", "digenrl", *typed])
    said = b""
    while b"resume it" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)  # the end of the session: SIGHUP for all that belongs to it
    os.waitpid(shell, 0)
    lines = said.decode().splitlines()
    process = psutil.Process(int(re.findall(r"in process (\d+)", said.decode())[0]))
    process.send_signal(signal.SIGHUP)
    try:
        commands = [
            shlex.split(each.partition(": ")[2].split(";")[0]) for each in lines if ": " in each
        ]
        assert commands[0] == ["digenrl", "watch", "away"]
        assert commands[1] == ["digenrl", "stop", "away"]
        assert commands[2][3:] == [*typed[:-1], "--resume"]

        def step() -> int:
            return int(json.loads(digenrl("runs", "--json", runs=runs))[0]["step"])

        before = step()
        wait_until(lambda: step() > before, PATIENCE_S)
        assert "away: " in digenrl("status", runs=runs)
        digenrl(*commands[1][1:], runs=runs)
        process.wait(PATIENCE_S)
    finally:
        for each in [*process.children(recursive=True), process] if process.is_running() else []:
            each.kill()
    [listed] = json.loads(digenrl("runs", "--json", runs=runs))
    assert (listed["state"], "stopped on request" in (runs / "away/logs/up.log").read_text()) == (
        "stopped", True,
    )  # fmt: skip
