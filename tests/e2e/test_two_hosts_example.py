"""`digenrl host` makes a run on two hosts, from nothing but a checkout."""

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

PATIENCE_S = 240.0
DIGENRL = [sys.executable, "-m", "digenrl"]

pytestmark = [pytest.mark.slow, pytest.mark.run]


@contextmanager
def running(
    host: Host, command: list[str], folder: Path, log: Path, variables: dict[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            host.command(command), cwd=folder,
            stdout=output, stderr=output, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
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


def leads(host: Host, recipe: str) -> list[str]:
    """The command line of a run's first host."""
    return [
        *DIGENRL, "host", "--at", host.address, "--recipe", recipe, "--run", "two-hosts",
        "--keys", "runs/two-hosts/keys", "--roles", "trainer,reward", "--until", "finished",
    ]  # fmt: skip


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
    monkeypatch.setenv("DIGENRL_MODELS", str(ROOT / "models"))
    first_log, second_log = tmp_path / "first.log", tmp_path / "second.log"
    with (
        network([None] * 2) as (first, second),
        running(first, leads(first, "small.toml"), tmp_path, first_log) as one,
    ):
        keys = tmp_path / "runs" / "two-hosts" / "keys"
        wait_for(keys / "hosts.env", one, first_log)
        hosts_env = Path(shutil.copy(keys / "hosts.env", there)).read_text()
        shutil.copytree(keys / "rollout", there / "rollout")
        status = first.command([*DIGENRL, "status", "two-hosts"])
        until_status(status, tmp_path, "waiting for a worker of: rollout")
        command = [*DIGENRL, "host", "--keys", ".", "--until", "finished", "--logs", "logs"]
        of_second = {
            "DIGENRL_SHARE_AT": f"{second.address}:7800",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        with running(second, command, there, second_log, of_second) as other:
            assert ended(other, second_log) == 0
        assert ended(one, first_log) == 0
    assert "BEGIN CERTIFICATE" in hosts_env and f"https://{first.address}" in hosts_env
    logs = second_log.read_text()
    assert logs.count('"event": "run_finished"') == 1
    assert '"event": "sharing"' in logs and "host_cache_unusable" not in logs
    assert list((tmp_path / "cache" / "digenrl").glob("*/" + "[0-9a-f]" * 64))
    check_commands(tmp_path)


def test_a_recipe_that_is_refused_ends_the_first_host_with_its_reason(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    (tmp_path / "wrong.toml").write_text("[run]\nsteps = 0\n")
    log = tmp_path / "first.log"
    with (
        network([None] * 1) as [first],
        running(first, leads(first, "wrong.toml"), tmp_path, log) as one,
    ):
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


def until_status(command: list[str], folder: Path, wanted: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while wanted not in (said := subprocess.run(
        command, cwd=folder, capture_output=True, text=True
    ).stdout):  # fmt: skip
        assert time.monotonic() < deadline, said
        time.sleep(1)


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
