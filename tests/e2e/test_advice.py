"""Every command that the product advises works: of a real run that is finished, each is executed.

Commands are found in the strings of the product's code, in what a run prints, and in what the
commands themselves print; so a hint that does not work fails here.
"""

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from shared.errors import DigenRLError
from tests.e2e.advice import DEMO, advised_in, advised_in_code, check_parsed, words_of
from tests.e2e.local_run import StartRun

pytestmark = [
    pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]  # fmt: skip

RUN = "small"
ELSEWHERE = {
    "adapter": "tests/reports/test_lora_files.py executes what is advised",
    "host": "needs a host's keys; tests/deploy executes it", "hosts": "the same",
    "copy": "needs a store; tests/e2e/test_copy.py executes it",
    "serve": "needs brokers", "serve-scorer": "serves for ever",
    "fetch": "needs the network", "push": "needs the network", "profile": "needs minutes",
    "check": "traces for minutes",
    "up": "executed at the end, with all options", "view": "executed at the end",
}  # fmt: skip
"""Commands whose words are checked, and that are not executed one by one."""
REFUSALS = ("is not in progress: finished", "the run is over", "no evaluated version of")
"""Refusals of a finished run, with their remedies."""


def executed(words: list[str]) -> str:
    """Execute a command of this test's folder; returns what it prints."""
    found = CliRunner().invoke(app, words[1:])
    if isinstance(found.exception, DigenRLError):
        said = str(found.exception)
        assert any(each in said for each in REFUSALS), f"{words}: {said}"
        return said
    assert found.exit_code == 0, (words, found.output, found.exception)
    return found.output


def test_every_command_that_is_advised_works_on_a_finished_run(
    start_run: StartRun, small_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = json.loads(small_recipe.read_text())
    plain["run"]["name"] = RUN
    small_recipe.write_text(json.dumps(plain))
    run = start_run("--steps", "2", name=RUN)
    output, _ = run.process.communicate(timeout=500)
    assert run.process.returncode == 0, output
    assert output.index("the run's page") < output.index("the scheduler's API")
    monkeypatch.chdir(tmp_path)
    last = [words[1] for words in map(str.split, advised_in(output))][-3:]
    assert last == ["view", "generate", "export"], output

    found = advised_in_code()
    assert {"digenrl tag {run} auto", "digenrl versions {run}"} <= found.keys()
    waiting = [*found, *advised_in(output)]
    resumed: dict[str, list[str]] = {}
    done: set[tuple[str, ...]] = set()
    while waiting:
        command = waiting.pop(0)
        words = words_of(command, RUN, small_recipe)
        if tuple(words) in done:
            continue
        done.add(tuple(words))
        has_arguments = check_parsed(words)
        if words[1] == "up":
            options = " ".join(words[3:]).split("--")[1:]
            resumed |= {each.split()[0]: f"--{each}".split() for each in options}
        elif has_arguments and words[1] not in ELSEWHERE and DEMO not in command.split():
            waiting += advised_in(executed(words))
    check_view()
    again = subprocess.run(
        [sys.executable, "-m", "digenrl", "up", str(small_recipe), *chain(*resumed.values()),
         "--steps", "2"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert again.returncode == 0, (resumed, again.stdout, again.stderr)


def check_view() -> None:
    """The page of a finished run answers at the link that the command prints."""
    viewing = subprocess.Popen(
        [sys.executable, "-m", "digenrl", "view", RUN], stdout=subprocess.PIPE, text=True
    )
    try:
        assert viewing.stdout is not None
        assert "http://127.0.0.1:" in viewing.stdout.readline()
    finally:
        viewing.terminate()
        viewing.communicate(timeout=60)
