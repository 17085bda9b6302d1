"""`examples/two-hosts` makes a run on two hosts, from nothing but a checkout."""

import os
import re
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
            of_second = {
                "SETTINGS": str(settings), "ADDRESS": second.address, "WORKERS": "2",
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
            }  # fmt: skip
            with running(second, EXAMPLE / "second-host.sh", second_log, of_second) as other:
                assert ended(other, second_log) == 0
            assert ended(one, first_log) == 0
    logs = second_log.read_text()
    assert logs.count('"event": "run_finished"') == 2
    assert '"event": "sharing"' in logs and "host_cache_unusable" not in logs
    assert list((tmp_path / "cache" / "digenrl").glob("*/" + "[0-9a-f]" * 64))


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
