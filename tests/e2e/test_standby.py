"""A second scheduler takes over a run of `digenrl up`: commands reach it, and `up` sees the end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.local_run import PATIENCE_S, LocalRun, StartRun, wait_until

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(1500)]


def second_scheduler(run: LocalRun, port: int, log: Path) -> "subprocess.Popen[bytes]":
    """Start it as docs/failures.md says, with what a scheduler of this run has to know."""
    *_, named = json.loads((run.folder / "keys" / "store.json").read_text())
    keys = run.folder / "keys"
    environment = os.environ | {
        "DIGENRL_SECRETS_DIR": str(keys / "scheduler"),
        "DIGENRL_API_TOKENS": str(keys / "api_tokens.json"),
        **{name: named[name] for name in ("DIGENRL_STORE_URL", "DIGENRL_S3_ENDPOINT")},
    }
    typed = ["serve", "scheduler", "--recipe", str(run.folder / "recipe.json"), "--port", str(port)]
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "digenrl", *typed], env=environment, stdout=output, stderr=output
        )


def readiness(url: str) -> str:
    try:
        return str(httpx.get(f"{url}/readyz", timeout=10).json()["status"])
    except httpx.HTTPError:
        return ""


def digenrl(run: LocalRun, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "digenrl", *arguments], capture_output=True, text=True, check=False,
        env=os.environ | {"DIGENRL_RUNS": str(run.folder.parent)}, timeout=PATIENCE_S,
    )  # fmt: skip


def test_a_run_that_a_standby_has_taken_over_is_steered_and_ends(
    start_run: StartRun, tmp_path: Path
) -> None:
    run = start_run("--steps", "60")
    run.wait_for(lambda view: view["step"] >= 1)
    url = f"http://127.0.0.1:{(port := run.free_port())}"
    second = second_scheduler(run, port, tmp_path / "second.log")
    try:
        wait_until(lambda: readiness(url).startswith("standby"), PATIENCE_S)
        [first] = [
            pid for pid in run.children()
            if "serve scheduler" in " ".join(psutil.Process(pid).cmdline())
        ]  # fmt: skip
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: readiness(url) == "ready", PATIENCE_S)
        wait_until(lambda: readiness(run.url).startswith("standby"), PATIENCE_S)
        step = run.wait_for(lambda view: view["phase"] == "running")["step"]
        run.wait_for(lambda view: view["step"] > step)
        run.post("/v1/run/pause").raise_for_status()
        run.wait_for(lambda view: view["phase"] == "paused")
        assert digenrl(run, "pause", "small").returncode == 0
        assert "paused" in digenrl(run, "status").stdout
        assert "rollout-0" in digenrl(run, "workers").stdout
        assert digenrl(run, "resume", "small").returncode == 0
        watched = digenrl(run, "watch", "small", "--json")
        assert watched.returncode == 0, watched.stderr
        assert json.loads(watched.stdout.splitlines()[-1])["phase"] == "finished"
        assert readiness(run.url).startswith("standby") or readiness(run.url) == ""
        assert run.finish()["commits"] == 60
    finally:
        second.kill()
        second.wait()
