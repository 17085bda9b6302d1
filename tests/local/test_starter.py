"""Forked processes are like those that Python starts, and need no starter once they run."""

import asyncio
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from digenrl.local.processes.preload import LIGHT, SERVICES
from digenrl.local.processes.starter import PreloadPlan, Starter, is_wanted
from digenrl.local.processes.supervisor import Supervisor
from shared.errors import UserError
from tests.e2e.local_run import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfds and subreapers")

CHILD = """
import json, os, random, sys, time
print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "argv": sys.argv[1:],
    "environment": dict(os.environ), "ahead": "library" in sys.modules, "random": random.random(),
    "path": sys.path,
}), flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""
LAUNCHES = """
import asyncio, sys
from pathlib import Path
from tests.local.test_starter import launching, say

async def main():
    async with launching(Path(sys.argv[1])) as supervisor:
        await say(supervisor, "600")
        await asyncio.sleep(600)

asyncio.run(main())
"""


@asynccontextmanager
async def launching(folder: Path, library: str = "") -> AsyncIterator[Supervisor]:
    """A supervisor whose starter imports ``library`` ahead of the module `child`."""
    (folder / "library.py").write_text(library)
    (folder / "child.py").write_text(CHILD)
    environment = {"PYTHONPATH": str(folder)}
    ahead = PreloadPlan(("library",), (), 1, {("child",): 1})
    starter = await Starter.begin(ahead, environment, folder / "starter.log")
    assert starter is not None
    try:
        yield Supervisor(folder, environment, starter)
    finally:
        await starter.stop()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "child", *arguments]


async def say(supervisor: Supervisor, seconds: str = "0", status: str = "0") -> Any:
    """Starts the module `child`. Returns the process and what it says of itself."""
    path = supervisor.logs / "child.log"
    with path.open("wb") as output:
        process = await supervisor.launch(
            command(seconds, status), {"OF": "this child"}, output.fileno()
        )
    await asyncio.to_thread(wait_until, lambda: path.read_text().endswith("\n"), 60)
    return process, json.loads(path.read_text())


async def test_a_forked_process_is_a_child_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    async with launching(tmp_path) as supervisor:
        first, said = await say(supervisor, "600")
        assert said["ahead"], "it was forked"
        assert str(Path.cwd()) not in said["path"], "whose packages may have the names of ours"
        assert said["pid"] == said["session"] == first.pid and said["parent"] == os.getpid()
        assert said["argv"] == ["600", "0"] and said["environment"]["OF"] == "this child"
        assert "OPENBLAS_NUM_THREADS" not in said["environment"], "which is the starter's"
        assert words_of(first.pid) == command("600", "0")
        second, other = await say(supervisor, status="7")
        assert await second.wait() == second.returncode == 7
        assert other["random"] != said["random"]
        first.send_signal(signal.SIGTERM)
        assert await first.wait() == -signal.SIGTERM


async def test_a_killed_starter_takes_nobody_along_and_python_starts_the_rest(
    tmp_path: Path,
) -> None:
    async with launching(tmp_path) as supervisor:
        assert supervisor.starter is not None
        forked, _ = await say(supervisor, "600")
        supervisor.starter.process.kill()
        started, said = await say(supervisor, "600")
        assert not said["ahead"] and said["parent"] == os.getpid()
        assert forked.returncode is started.returncode is None
        for each in (forked, started):
            each.send_signal(signal.SIGKILL)
            assert await each.wait() == -signal.SIGKILL


async def test_a_process_with_other_values_of_what_is_read_at_import_is_not_forked(
    tmp_path: Path,
) -> None:
    async with launching(tmp_path) as supervisor:
        supervisor.environment["DIGENRL_FAILPOINT"] = "nowhere:1"
        process, said = await say(supervisor)
        assert not said["ahead"] and await process.wait() == 0


async def test_a_starter_with_a_thread_forks_nothing_which_is_no_reason_to_warn(
    tmp_path: Path,
) -> None:
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()"
    with capture_logs() as said_of_it:
        async with launching(tmp_path, thread) as supervisor:
            process, said = await say(supervisor)
            assert not said["ahead"] and await process.wait() == 0
    [entry] = [each for each in said_of_it if each["event"].startswith("starter_")]
    assert (entry["event"], entry["log_level"]) == ("starter_unfit", "info")
    log = (tmp_path / "starter.log").read_text()
    assert re.search(r"the libraries have begun 2 threads \(\w+, \w+\)", log)


async def test_a_process_that_is_not_wanted_any_more_when_it_could_begin_does_not(
    tmp_path: Path,
) -> None:
    slow = (
        "import pathlib, time\n"
        f"while not pathlib.Path({str(tmp_path)!r}, 'go').exists(): time.sleep(.01)"
    )
    async with launching(tmp_path, slow) as supervisor:
        waiting = asyncio.create_task(supervisor.launch(command("600", "0"), {}))
        await asyncio.sleep(0)
        waiting.cancel()
        (tmp_path / "go").touch()
        await say(supervisor)
        assert not [pid for pid in children() if "600" in words_of(pid)]


def children() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def words_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


def test_whoever_asked_takes_its_children_along_however_it_ends(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", LAUNCHES, str(tmp_path)]) as process:
        said = tmp_path / "child.log"
        wait_until(lambda: said.exists() and said.read_text().endswith("\n"), 60)
        child = json.loads(said.read_text())["pid"]
        assert Path(f"/proc/{child}").exists()
        process.kill()
    wait_until(lambda: not Path(f"/proc/{child}").exists(), 10)


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIGENRL_STARTER", "off")
    assert not is_wanted()
    monkeypatch.setenv("DIGENRL_STARTER", "no")
    with pytest.raises(UserError, match="DIGENRL_STARTER: 'no' is neither on nor off"):
        is_wanted()


def test_every_module_that_is_imported_ahead_exists() -> None:
    assert [name for name in (*LIGHT, *SERVICES) if importlib.util.find_spec(name) is None] == []
