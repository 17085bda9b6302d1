"""`examples/two-hosts` makes a run on two hosts, from nothing but a checkout.

Paths are relative, as people type them, and `sh` is Debian's dash where there is one.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.spread.network import Host, network, why_not
from tests.paths import DEMO, ROOT

EXAMPLE = ROOT / "examples" / "two-hosts"
PATIENCE_S = 240.0
DIGENRL = [sys.executable, "-m", "digenrl"]

pytestmark = [pytest.mark.slow, pytest.mark.run]


@contextmanager
def running(
    host: Host, script: Path, folder: Path, log: Path, variables: dict[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            host.command([shutil.which("dash") or "sh", str(script)]), cwd=folder,
            stdout=output, stderr=output, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "VENV": str(venv()), **variables},
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def venv() -> Path:
    return Path(sys.prefix)


def test_a_run_on_two_hosts_needs_one_command_on_each_and_leaves_a_run_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    (tmp_path / "small.toml").write_text(smaller(DEMO.read_text()))
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first_log, second_log = tmp_path / "first.log", tmp_path / "second.log"
    with network(2, None) as (first, second):
        of_first = {"ADDRESS": first.address, "RECIPE": "small.toml", "DATA": "runs/two-hosts"}
        with running(first, EXAMPLE / "first-host.sh", tmp_path, first_log, of_first) as one:
            settings = tmp_path / "runs" / "two-hosts" / "hosts.env"
            wait_for(settings, one, first_log)
            assert settings.stat().st_mode & 0o077 == 0
            hosts_env = Path(shutil.copy(settings, there)).read_text()
            link = until_said(r"ten minutes: (http://127\.0\.0\.1:8001/\S+)", one, first_log)
            assert "<title>two-hosts - overview" in done(first.command(opens(link)), tmp_path)
            status = first.command([*DIGENRL, "status", "two-hosts"])
            until_status(status, tmp_path, "waiting for a worker of: rollout")
            of_second = {
                "SETTINGS": "hosts.env", "ADDRESS": second.address, "WORKERS": "2",
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
            }  # fmt: skip
            with running(second, EXAMPLE / "second-host.sh", there, second_log, of_second) as other:
                assert ended(other, second_log) == 0
            assert ended(one, first_log) == 0
    assert "BEGIN CERTIFICATE" in hosts_env and f"https://{first.address}" in hosts_env
    said = first_log.read_text()
    assert f"https://{first.address}:8000" in said
    assert re.search(r"training reward.* [+-]0?\.\d{3}", said.rpartition("evaluating")[2])
    assert "digenrl view two-hosts" in said.rpartition("evaluating")[2]
    logs = second_log.read_text()
    assert logs.count('"event": "run_finished"') == 2
    assert '"event": "sharing"' in logs and "host_cache_unusable" not in logs
    assert list((tmp_path / "cache" / "digenrl").glob("*/" + "[0-9a-f]" * 64))
    check_commands(tmp_path)


def test_a_recipe_that_is_refused_ends_the_first_host_with_its_reason(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    (tmp_path / "wrong.toml").write_text("[run]\nsteps = 0\n")
    log = tmp_path / "first.log"
    with network(1, None) as [first]:
        given = {"ADDRESS": first.address, "RECIPE": "wrong.toml", "DATA": "data", "TLS": "0"}
        with running(first, EXAMPLE / "first-host.sh", tmp_path, log, given) as one:
            assert ended(one, log) == 2
    assert "run.steps" in log.read_text()


def check_commands(folder: Path) -> None:
    """The commands find the run, once it is over, as they find one of `digenrl up`."""
    assert re.search(r"two-hosts +finished +2 of 2", done([*DIGENRL, "runs"], folder))
    assert "finished" in done([*DIGENRL, "status", "two-hosts"], folder)
    assert re.search(r"^2 .*kept", done([*DIGENRL, "versions", "two-hosts"], folder), re.MULTILINE)
    assert "training reward" in done([*DIGENRL, "report", "two-hosts"], folder)
    with subprocess.Popen(
        [*DIGENRL, "view", "two-hosts"], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as view:
        try:
            assert view.stdout is not None
            page = done(opens(view.stdout.readline().strip()), folder)
            assert "<title>two-hosts - overview" in page
        finally:
            view.terminate()


def opens(link: str) -> list[str]:
    """A command that opens a link as a browser does, and prints the page."""
    script = "import httpx, sys; print(httpx.get(sys.argv[1], follow_redirects=True).text)"
    return [sys.executable, "-c", script, link]


def done(command: list[str], folder: Path) -> str:
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}"
    return ran.stdout


def until_said(pattern: str, process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while (found := re.search(pattern, log.read_text())) is None:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.1)
    return found[1]


def until_status(command: list[str], folder: Path, wanted: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while wanted not in (said := subprocess.run(
        command, cwd=folder, capture_output=True, text=True
    ).stdout):  # fmt: skip
        assert time.monotonic() < deadline, said
        time.sleep(1)


def test_a_run_without_encryption_says_so(tmp_path: Path) -> None:
    for name in ("dirname", "sh", "rm"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    (tmp_path / "bin").mkdir()
    fails = tmp_path / "bin" / "digenrl"
    fails.write_text("#!/bin/sh\nexit 1\n")
    fails.chmod(0o755)
    environment = {
        "PATH": str(tmp_path), "VENV": str(tmp_path), "ADDRESS": "127.0.0.1", "TLS": "0",
        "DATA": str(tmp_path / "data"),
    }  # fmt: skip
    done = subprocess.run(
        [str(EXAMPLE / "first-host.sh")], env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0 and "TLS=0: nothing is encrypted" in done.stderr


def smaller(recipe: str) -> str:
    changes = (
        (r"\nsteps = \d+\n", "\nsteps = 2\n"),
        (r"\ngroups = \d+", "\ngroups = 2"),
        (r"\ngroup_size = \d+", "\ngroup_size = 4"),
        (r"\nmicro_batch = \d+", "\nmicro_batch = 4"),
        # The first host's trainer would generate all of it alone before the second host has begun.
        (r"\nfragment_size = \d+", '\nfragment_size = 4\ntag = "off"'),
        (r'"\.\./models/digits"', f'"{ROOT / "models" / "digits"}"'),
        (r'"digits\.prompts\.jsonl"', f'"{DEMO.parent / "digits.prompts.jsonl"}"'),
    )
    for pattern, change in changes:
        recipe, found = re.subn(pattern, change, recipe, count=1)
        assert found, pattern
    return recipe


def wait_for(file: Path, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not (file.exists() and file.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.1)


def ended(process: "subprocess.Popen[bytes]", log: Path) -> int:
    try:
        return process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(log.read_text()[-3000:]) from None
