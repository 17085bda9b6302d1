"""Whole runs of the digits with real services on near hosts and a far one.

The brokers, the scheduler, the reward worker and with roles the trainer are on the first host. Each
other host has a worker: in mode roles one that generates, in mode fluid a member. The near ones
train some batches alone; then the run pauses until the far one has joined. Its line changes while
the run goes on.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from bench.spread.far_line import FarLine, RunningLine
from bench.spread.network import Host, network
from digenrl.local.brokers.embedded import plan_brokers
from digenrl.local.processes.ports import free_ports
from shared.errors import UserError
from shared.recipe.recipe import load_recipe, override

Mode = Literal["roles", "fluid"]
RECIPES = {"roles": Path("recipes/digits.toml"), "fluid": Path("recipes/digits-fluid.toml")}
GROUPS = 6
PASSWORD = "far"
LOOK_S = 1.0
PATIENCE_S = 900.0
END_S = 20.0


@dataclass(frozen=True, slots=True)
class RunOnLine:
    """Steps and seconds of a run, and the work that its workers lost, declined and did."""

    phase: str
    step: int
    without: list[float]
    """Seconds of batches before the far worker has joined, without the first."""
    seconds: list[list[float]]
    """Seconds of batches with each line, without the first one, and after a change the second."""
    near: list[str]
    """Addresses of the near workers."""
    lost: list[str]
    """Events in the scheduler's log about workers that left, or were excluded or refused."""
    missed: int
    """Rounds of sums that came to nothing at a member."""
    declined: list[str]
    """Reasons that the far worker reported for declined work, the oldest first."""
    done: dict[str, int]
    """Fragments or pieces of each worker."""
    back: float | None
    """Seconds from the end of a cut until the far worker, which had left, took part again."""


@dataclass
class Lab:
    """Processes of a run."""

    folder: Path
    environment: dict[str, str]
    running: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)

    def start(self, host: Host, name: str, *argv: str, **environment: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                host.command(argv), stdout=log, stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment, **environment},
            )  # fmt: skip

    def serve(self, host: Host, name: str, service: str, *more: str, **environment: str) -> None:
        named = () if service == "scheduler" else ("--worker", name)
        argv = (sys.executable, "-m", "digenrl", "serve", service, *more, *named)
        self.start(host, name, *argv, **environment)

    def work(self, host: Host, name: str, service: str, **environment: str) -> None:
        """Start a worker with a cache of its own, as hosts have it."""
        cache = str((self.folder / f"cache-{name}").absolute())
        self.serve(host, name, service, DIGENRL_HOST_CACHE=cache, **environment)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def inside(host: Host) -> Iterator[Callable[..., Any]]:
    """Yield a function that returns what a URL has, as JSON, asked from a host; None if there is
    no answer."""

    def request(url: str, body: bytes | None = None) -> Any:
        try:
            with urlopen(
                Request(url, body, {"content-type": "application/json"}), timeout=10
            ) as response:
                return json.load(response)
        except HTTPError as error:
            if error.code in (404, 503):
                return None
            raise
        except (URLError, TimeoutError, ConnectionError):
            return None

    with ThreadPoolExecutor(1, initializer=host.enter) as thread:
        yield lambda *given: thread.submit(request, *given).result()


def measure_run(
    folder: Path, mode: Mode, lines: Sequence[FarLine], *,
    near: int, alone: int, together: int, exchange: str = "store", site: str = "far",
    cut_s: float = 0.0,
) -> RunOnLine:  # fmt: skip
    """Measure a run with ``near`` near workers that train ``alone`` batches, and ``together`` ones
    with a worker behind each of the ``lines``, one after the other. With ``cut_s``, the first line
    is cut for as long.

    Raises:
        UserError: if this machine has no such lines, or the run does not get on.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    steps = alone + together * len(lines)
    changes: dict[str, Any] = {"run.steps": steps, "run.name": "far", "batch.groups": GROUPS}
    if mode == "fluid":
        changes |= {"trainer.devices": near + 1, "trainer.exchange": exchange}
    recipe = folder / "recipe.json"
    recipe.write_text(override(load_recipe(RECIPES[mode]), changes).model_dump_json())
    with ExitStack() as stack:
        first, *near_hosts, far_host = stack.enter_context(
            network([*[None] * (1 + near), lines[0]])
        )
        brokers = plan_brokers(folder / "brokers", PASSWORD, at=first.address)
        lab = Lab(folder, {**brokers.environment, "DIGENRL_RUN": "far"})
        stack.callback(lab.stop)
        for program in brokers.programs:
            lab.start(first, program.name, *program.argv, **program.environment)
        port = free_ports(1)[0]
        started = ("--recipe", str(recipe.absolute()), "--port", str(port), "--open-api")
        lab.serve(first, "scheduler", "scheduler", *started)
        ask = stack.enter_context(inside(first))
        watch = Watch(lab, lambda path, *body: ask(f"http://127.0.0.1:{port}{path}", *body))
        if mode == "roles":
            lab.serve(first, "trainer-0", "trainer")
        lab.serve(first, "reward-0", "reward")
        service = "rollout" if mode == "roles" else "trainer"
        for number, host in enumerate(near_hosts):
            lab.work(host, f"near-{number}", service)
        watch.until("near batches", lambda: watch.run.get("step", 0) >= alone)
        joined = watch.addresses("near-")
        watch.ask("/v1/run/pause", b"{}")
        lab.work(far_host, "far", service, DIGENRL_SITE=site)
        watch.until("far worker", lambda: "far" in watch.names())
        watch.ask("/v1/run/resume", b"{}")
        begun = [watch.run["step"]]
        if cut_s and far_host.line is not None:
            watch.cut(far_host.line, lines[0], cut_s)
        for line in lines[1:]:
            last = begun[-1] + together
            watch.until("batches", lambda: watch.run["step"] >= last)  # noqa: B023
            assert far_host.line is not None
            far_host.line.set(line)
            begun.append(watch.run["step"])
        watch.until("end", watch.is_over)
        return watch.result(joined, alone, begun)


@dataclass
class Watch:
    """Looks at a run until it is over."""

    lab: Lab
    ask: Callable[..., Any]
    run: dict[str, Any] = field(default_factory=dict)
    workers: list[dict[str, Any]] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)
    back: float | None = None

    def cut(self, running: RunningLine, line: FarLine, seconds: float) -> None:
        """Cut the line of the far worker, and wait until the worker is back."""
        running.set(replace(line, is_cut=True))
        ends = time.monotonic() + seconds
        self.until("end of a lease", lambda: "far" not in self.names())
        time.sleep(max(0.0, ends - time.monotonic()))
        running.set(line)
        began = time.monotonic()
        self.until("return of the far worker", lambda: "far" in self.names())
        self.back = round(time.monotonic() - began, 2)

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.look()
            if condition():
                return
            ended = [n for n, each in self.lab.running.items() if each.poll()]
            is_dead = ended or self.is_over()
            if is_dead or time.monotonic() > deadline:
                raise UserError(f"no {what}; ended: {ended}; {self.run} {self.workers}")
            time.sleep(LOOK_S)

    def look(self) -> None:
        self.run = self.ask("/v1/run") or self.run
        self.workers = self.ask("/v1/workers") or self.workers
        now = [each["declines"] for each in self.workers if each["worker"] == "far"]
        if now and now[0] and now[0] not in self.declined[-1:]:
            self.declined.append(now[0])

    def names(self) -> set[str]:
        return {each["worker"] for each in self.workers}

    def addresses(self, prefix: str) -> list[str]:
        return sorted(e["address"] for e in self.workers if e["worker"].startswith(prefix))

    def is_over(self) -> bool:
        return self.run.get("phase") in ("finished", "failed")

    def result(self, near: list[str], alone: int, begun: list[int]) -> RunOnLine:
        """``begun``: number of the first batch with each line."""
        step = self.run["step"]
        usage = [self.ask(f"/v1/batches/{batch}/usage") for batch in range(step)]
        seconds = [round(each["seconds"], 2) if each else 0.0 for each in usage]
        log = self.lab.log("scheduler").partition('"phase": "finished"')[0]  # then all leave
        return RunOnLine(
            phase=self.run["phase"],
            step=step,
            without=seconds[1:alone],
            seconds=[
                seconds[first + 1 + bool(number) : after]
                for number, (first, after) in enumerate(pairwise([*begun, step]))
            ],
            near=near,
            lost=re.findall(r".*(?:worker_left|worker_not_asked|worker_refused).*", log),
            missed=sum(self.lab.log(name).count('"exchange_missed"') for name in self.lab.running),
            declined=self.declined,
            back=self.back,
            done={each["worker"]: each["num_done"] for each in self.workers},
        )
