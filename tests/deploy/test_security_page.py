"""What docs/security.md has people type by hand they can type: on two hosts, brokers with TLS, a
scheduler, and a worker that has the keys of its role alone."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench.spread.network import Host, network, why_not
from digenrl.local.brokers.embedded import broker_binaries
from tests.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.run, pytest.mark.timeout(300)]
PAGE = ROOT / "docs" / "security.md"
PATIENCE_S = 120.0
FINISHES = ("digenrl keys", "scp")
"""Commands that end by themselves; all others serve."""


def block(heading: str) -> list[str]:
    """Return what is typed in the first block of code under a heading, without comments."""
    text = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = re.split(r"^```.*$", text, flags=re.MULTILINE)[1].splitlines()
    typed = [re.sub(r"\s+#.*$", "", line).strip() for line in lines]
    return [line for line in typed if line and line != ". .venv/bin/activate"]


def programs(folder: Path) -> Path:
    """Make a folder of the programs that are typed, by these names."""
    folder.mkdir()
    found = {name: path for name, path in broker_binaries().items() if isinstance(path, str)}
    if (there := shutil.which("redis-server") or found.get("valkey-server")) is not None:
        found["redis-server"] = there
    found["digenrl"] = str(Path(sys.prefix) / "bin" / "digenrl")
    for name, path in found.items():
        (folder / name).symlink_to(path)
    copy = folder / "scp"  # the hosts have one disk
    copy.write_text('#!/bin/sh\nexec cp "$1" "$2" "$(echo "$3" | sed s,^second:,second/,)"\n')
    copy.chmod(0o755)
    return folder


@contextmanager
def serving(host: Host, line: str, here: Path, log: Path) -> Iterator[None]:
    """Have a command run on a host meanwhile."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            host.command(["bash", "-c", line]), cwd=here, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which commands find their programs, and another host's; each has a checkout."""
    for checkout in (tmp_path, tmp_path / "second"):
        checkout.mkdir(exist_ok=True)
        for name in ("recipes", "models"):
            (checkout / name).symlink_to(ROOT / name)
    monkeypatch.setenv("PATH", f"{programs(tmp_path / 'bin')}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def ended(line: str, here: Path) -> str:
    """Run a command to its end, and return what it says."""
    done = subprocess.run(["bash", "-c", line], cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    return done.stdout


def move_data(here: Path, data: Path) -> None:
    """Have brokers keep their data in this folder instead of /data."""
    for config in (here / "keys" / "brokers").glob("*/*.conf"):
        config.write_text(re.sub(r"(?<![\w/])/data\b", str(data), config.read_text()))


def test_a_run_on_two_hosts_with_tls_can_be_typed_by_hand(here: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    logs, data = dict[str, Path](), here / "data"
    data.mkdir()
    with network([None] * 2) as (first, second), ExitStack() as running:
        for number, typed in enumerate(block("TLS")):
            line = typed.replace("10.0.0.1", first.address)
            if line.startswith(FINISHES):
                ended(line, here)
                if "init" in line:
                    move_data(here, data)
                continue
            line = line.replace("/data", str(data))
            host, folder = (first, here) if "rollout" not in line else (second, here / "second")
            logs[line] = here / f"{number}.log"
            running.enter_context(serving(host, line, folder, logs[line]))
        scheduler = next(log for line, log in logs.items() if "serve scheduler" in line)
        text = until(scheduler, '"service": "rollout", "event": "worker_joined"', logs.values())
        place = f"https://{first.address}:8000"
        assert place in text
        link = next(line for line in block("Secrets") if line.startswith("digenrl keys link"))
        typed = shlex.join(first.command(shlex.split(link.replace("http://localhost:8000", place))))
        assert ended(typed, here).strip().startswith(f"{place}/")


def test_secrets_of_brokers_that_others_start_are_made_as_they_are_typed(here: Path) -> None:
    made, token, _ = block("Secrets")
    assert "DIGENRL_SECRETS_DIR=keys/<role>" in ended(made, here)
    assert len(ended(token, here).strip()) > 20


def until(log: Path, wanted: str, logs: Iterable[Path]) -> str:
    """Return what a command has written, as soon as it has written this."""
    deadline = time.monotonic() + PATIENCE_S
    while wanted not in (text := log.read_text(errors="replace")):
        assert time.monotonic() < deadline, "\n".join(
            f"{each.name}: {each.read_text(errors='replace')[-1500:]}" for each in logs
        )
        time.sleep(0.2)
    return text
