"""`examples/two-hosts` makes a run on two hosts, from nothing but a checkout."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.spread.network import Host, network, why_not
from tests.paths import DEMO, ROOT

EXAMPLE = ROOT / "examples" / "two-hosts"
PATIENCE_S = 240.0

pytestmark = [pytest.mark.slow, pytest.mark.run]


@contextmanager
def running(
    host: Host, script: Path, log: Path, variables: dict[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            host.command([str(script)]), stdout=output, stderr=output, start_new_session=True,
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
    import sys

    return Path(sys.prefix)


def test_a_run_on_two_hosts_needs_one_command_on_each(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    small = tmp_path / "small.toml"
    small.write_text(smaller(DEMO.read_text()))
    data = tmp_path / "data"
    first_log, second_log = tmp_path / "first.log", tmp_path / "second.log"
    with network(2, None) as (first, second):
        of_first = {"ADDRESS": first.address, "RECIPE": str(small), "DATA": str(data)}
        with running(first, EXAMPLE / "first-host.sh", first_log, of_first) as one:
            settings = data / "hosts.env"
            wait_for(settings, one, first_log)
            assert settings.stat().st_mode & 0o077 == 0
            hosts_env = settings.read_text()
            of_second = {
                "SETTINGS": str(settings), "ADDRESS": second.address, "WORKERS": "2",
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
            }  # fmt: skip
            with running(second, EXAMPLE / "second-host.sh", second_log, of_second) as other:
                assert ended(other, second_log) == 0
            assert ended(one, first_log) == 0
    assert "BEGIN CERTIFICATE" in hosts_env and f"https://{first.address}" in hosts_env
    assert f"https://{first.address}:8000" in first_log.read_text()
    logs = second_log.read_text()
    assert logs.count('"event": "run_finished"') == 2
    assert '"event": "sharing"' in logs and "host_cache_unusable" not in logs
    assert list((tmp_path / "cache" / "digenrl").glob("*/" + "[0-9a-f]" * 64))


@pytest.mark.parametrize(
    ("tls", "says"), [("0", "TLS=0: nothing is encrypted"), ("1", "openssl is missing")]
)
def test_a_run_without_encryption_says_so_and_is_asked_for(
    tls: str, says: str, tmp_path: Path
) -> None:
    for name in ("dirname", "sh", "rm"):  # and no openssl
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    (tmp_path / "bin").mkdir()
    fails = tmp_path / "bin" / "digenrl"
    fails.write_text("#!/bin/sh\nexit 1\n")
    fails.chmod(0o755)
    environment = {
        "PATH": str(tmp_path), "VENV": str(tmp_path), "ADDRESS": "127.0.0.1", "TLS": tls,
        "DATA": str(tmp_path / "data"),
    }  # fmt: skip
    done = subprocess.run(
        [str(EXAMPLE / "first-host.sh")], env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0 and says in done.stderr


def smaller(recipe: str) -> str:
    changes = (
        (r"\nsteps = 12\n", "\nsteps = 2\n"),
        (r"\ngroups = \d+", "\ngroups = 2"),
        (r"\ngroup_size = \d+", "\ngroup_size = 4"),
        (r"\nmicro_batch = \d+", "\nmicro_batch = 4"),
        (r"\nfragment_size = \d+", "\nfragment_size = 4"),
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
