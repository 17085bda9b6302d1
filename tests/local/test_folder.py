"""Neither the folder that somebody works in nor what is not installed gets in the way."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from digenrl.local.brokers.embedded import Program
from digenrl.local.processes.supervisor import Supervisor
from digenrl.local.running.command_lines import command
from tests.paths import ROOT


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with foreign packages that have the names of ours."""
    for name in ("shared", "services", "digenrl"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('the other {name}')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def when_written(log: Path) -> str:
    """The log as soon as the worker has found its way, or an error its way into it."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        text = log.read_text()
        if "waiting_for_recipe" in text or "Error" in text:
            return text
        time.sleep(0.1)
    raise AssertionError("it says nothing")


async def test_children_are_ours_in_a_folder_with_packages_of_the_same_names(foreign: Path) -> None:
    async def ready() -> bool:
        return True

    supervisor = Supervisor(foreign, {"DIGENRL_STORE_URL": f"file://{foreign}/objects"})
    serve = command("serve", "reward", "--run", "digits")
    await supervisor.start(Program(name="reward-0", argv=serve, ready=ready), wait=False)
    log = foreign / "reward-0.log"
    text = await asyncio.to_thread(when_written, log)
    await supervisor.stop(["reward-0"])
    assert "Error" not in text, text


def test_the_module_is_ours_there_too(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "__init__.py").write_text("raise RuntimeError('the other shared')")
    ended = subprocess.run(
        [sys.executable, "-m", "digenrl", "--version"], cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout[:8]) == (0, "digenrl "), ended.stderr


def test_processes_that_tests_start_are_of_this_checkout(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-c", "import shared; print(shared.__file__)"], cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(ended.stdout.strip()) == ROOT / "shared" / "__init__.py"


WITHOUT = """
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
def found(name, path=None, target=None):
    absent = {"numpy", "torch", "diffusers", "transformers", "safetensors", "PIL", "sklearn"}
    return None if name.split(".")[0] in absent else find(name, path, target)
importlib.machinery.PathFinder.find_spec = found
from digenrl.commands.cli import main
for words in sys.argv[1:]:
    sys.argv = ["digenrl", *words.split()]
    try:
        main()
    except SystemExit as ended:
        print("ended with", ended.code)
"""
"""Commands in an environment like that of the scheduler's image."""


def test_recipes_are_checked_where_the_scheduler_alone_is_installed() -> None:
    """What a check lacks there, it says in one line."""
    commands = (
        "check recipes/digits.toml --elsewhere", "check recipes/flux1-dev.mixed.toml --elsewhere",
        "check recipes/digits.toml",
    )  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT, *commands], cwd=ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    said = ended.stdout.splitlines()
    assert [line for line in said if line.startswith("ended")] == [
        "ended with 0", "ended with 0", "ended with 2",
    ]  # fmt: skip
    assert ended.stdout.count(" steps of ") >= 2 and "are on other hosts" in ended.stdout
    assert ended.stderr.count("\n") == 1 and "not found)" in ended.stderr
