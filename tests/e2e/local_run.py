"""A whole run for a test to watch, steer and kill: `digenrl up` in a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from digenrl.local.processes.ports import free_ports
from digenrl.local.secrets.tokens import KEYS, Tokens
from shared.errors import UserError
from shared.recipe.recipe import load_recipe, override
from tests.paths import DIGITS

PATIENCE_S = 500

SMALL = {
    "batch.groups": 3,
    "batch.group_size": 4,
    "schedule.fragment_size": 2,
    "trainer.micro_batch": 4,
    "evaluation.samples_per_prompt": 1,
}
"""Changes that cut the plain recipe of the digits down to batches of a second."""


def recipe_of(folder: Path, changes: Mapping[str, Any]) -> Path:
    """Write the digits' recipe with these changes to a file of its own."""
    path = folder / f"recipe-{len(list(folder.iterdir()))}.json"
    path.write_text(override(load_recipe(DIGITS), changes).model_dump_json())
    return path


@dataclass
class LocalRun:
    """A run of `digenrl up`, and what it says about itself."""

    process: "subprocess.Popen[str]"
    folder: Path
    url: str
    output: str = ""
    """What it printed, once it is finished."""
    joined: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def get(self, path: str) -> Any:
        return self.ask(path).raise_for_status().json()

    def ask(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=10, headers=self.tokens.headers("viewer"))

    def post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        headers = self.tokens.headers("operator")
        return httpx.post(f"{self.url}{path}", json=body, timeout=10, headers=headers)

    @property
    def tokens(self) -> Tokens:
        """Those of the run, which `up` makes."""
        return Tokens(self.folder / KEYS)

    def free_port(self) -> int:
        return free_ports(1)[0]

    def wait_for(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Returns the first view of the run that fulfils ``condition``."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                run: dict[str, Any] = self.get("/v1/run")
                if condition(run):
                    return run
            except (httpx.HTTPError, UserError):  # it has no tokens yet
                pass
            assert self.process.poll() is None, "the run has ended"
            time.sleep(0.1)
        raise AssertionError("the run did not get there")

    def finish(self) -> dict[str, Any]:
        """Wait for the end; returns summary.json."""
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        self.output = output
        assert self.process.returncode == 0, output
        assert "loading_model" not in output, "what services log is in files"
        assert "starter_lost" not in output, "the libraries can be imported ahead"
        if (forked := self.folder / "logs" / "starter.log").exists():
            for words in ("serve scheduler", "serve reward", "serve trainer", "report --run"):
                assert f" {words}" in forked.read_text(), "each was forked"
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary

    def children(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children()]

    def member(self, name: str) -> psutil.Process:
        """Return the process of one member."""
        found: psutil.Process = next(
            child for child in psutil.Process(self.process.pid).children()
            if name in child.cmdline()
        )  # fmt: skip
        return found

    def join(
        self, name: str, variables: Mapping[str, str], ranks: int | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start another member as the first one was, of another number of ranks if one is given.
        What the starter has forked shows neither its command nor its environment to others."""
        first = self.member("trainer-0")
        command = [each.replace("trainer-0", name) for each in first.cmdline()]
        command[command.index("--port") + 1] = "0"
        if ranks is not None:
            command[command.index("digenrl.local.processes.ranks") + 1] = str(ranks)
        given = {key: value.replace("trainer-0", name) for key, value in first.environ().items()}
        environment = {**given, **variables, "DIGENRL_PORT": "0"}
        with (self.folder / "logs" / f"{name}.log").open("wb") as log:
            self.joined.append(
                subprocess.Popen(command, cwd=first.cwd(), env=environment, stdout=log, stderr=log)
            )
        return self.joined[-1]

    def kill_everything(self) -> None:
        """SIGKILL for the supervisor and every child of it."""
        for pid in [self.process.pid, *self.children()]:
            with contextlib.suppress(ProcessLookupError):  # they die with their supervisor
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


StartRun = Callable[..., LocalRun]


def wait_until(condition: Callable[[], bool], seconds: float) -> float:
    """Returns the seconds until ``condition`` holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.05)
    return time.monotonic() - began
