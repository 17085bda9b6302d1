"""Keeps child processes running, and stops them in order.

A child that dies is restarted, after a delay that grows each time. On Linux the children also die
with this process, however it ends: an orphan would write to a run that somebody resumes.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from digenrl.local.brokers import Program, wait_ready
from shared.errors import DigenRLError

STOP_S = 20.0
MAX_BACKOFF_S = 10.0
STABLE_S = 30.0
"""A child that lived this long counts as useful, unless it reports its work."""
MAX_DEATHS = 8
"""Number of deaths in a row, without work in between, after which a child is given up."""
PR_SET_PDEATHSIG = 1
EXIT_USER_ERROR = 2
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Variable for every child: the working folder may hold packages with the names of ours."""

log = structlog.get_logger()


class ChildFailed(DigenRLError):
    """Raised when a child keeps failing."""


@dataclass(slots=True)
class Child:
    program: Program
    log_path: Path
    process: asyncio.subprocess.Process | None = None
    num_restarts: int = 0
    stopping: bool = False
    works: set[str] = field(default_factory=set)
    """States of its work that `record_work` has reported."""
    has_worked: bool = False
    """Whether it has worked since its latest start."""
    keeper: "asyncio.Task[None] | None" = None


@dataclass(slots=True)
class Supervisor:
    logs: Path
    environment: dict[str, str]
    """Variables for every child, in addition to its own and the inherited ones."""
    children: dict[str, Child] = field(default_factory=dict)
    failed: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Holds the exception once a child keeps failing."""

    async def start(self, program: Program, *, wait: bool = True) -> None:
        """Start a program and keep it running; with ``wait``, return once it answers."""
        child = Child(program, self.logs / f"{program.name}.log")
        self.children[program.name] = child
        await self._spawn(child)
        child.keeper = asyncio.create_task(self._keep(child))
        if wait:
            ready = asyncio.create_task(wait_ready(program))
            await asyncio.wait({ready, self.failed}, return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                ready.cancel()
                self.failed.result()
            await ready

    async def stop(self, names: list[str], *, seconds: float = STOP_S) -> None:
        """Ask these children to end, wait, and kill those that are still running."""
        wanted = [self.children[name] for name in names if name in self.children]
        for child in wanted:
            child.stopping = True
            _signal(child, signal.SIGTERM)
        keepers = [child.keeper for child in wanted if child.keeper]
        if keepers:
            _, late = await asyncio.wait(keepers, timeout=seconds)
            if late:
                for child in wanted:
                    _signal(child, signal.SIGKILL)
                await asyncio.wait(late)
        for child in wanted:
            self.children.pop(child.program.name, None)

    def is_kept(self, name: str) -> bool:
        """Tell whether the child was started and has not been given up."""
        child = self.children.get(name)
        return child is not None and child.keeper is not None and not child.keeper.done()

    def record_work(self, name: str, work: str) -> None:
        """Record that a child has done ``work``, a label that changes with each progress."""
        child = self.children.get(name)
        if child is not None and work not in child.works:
            child.works.add(work)
            child.has_worked = True

    async def _spawn(self, child: Child) -> None:
        with child.log_path.open("ab") as output:
            child.process = await asyncio.create_subprocess_exec(
                *child.program.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.environment, **child.program.environment, **SAFE_PATH},
                start_new_session=True,  # Ctrl-C ends this process, which stops the others in order
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )

    async def _keep(self, child: Child) -> None:
        deaths = 0
        while True:
            assert child.process is not None
            began = time.monotonic()
            status = await child.process.wait()
            if child.stopping:
                return
            is_useful = time.monotonic() - began > STABLE_S
            if child.program.reports_work:
                is_useful, child.has_worked = child.has_worked, False
            deaths = 0 if is_useful else deaths + 1
            if status == EXIT_USER_ERROR or deaths > MAX_DEATHS:
                self._fail(child, status)
                return
            log.warning("child_died", name=child.program.name, status=status)
            await asyncio.sleep(min(MAX_BACKOFF_S, 0.2 * 2 ** (deaths - 1)))
            if child.stopping:
                return
            child.num_restarts += 1
            await self._spawn(child)

    def _fail(self, child: Child, status: int) -> None:
        last = last_line(child.log_path)
        if child.program.optional:
            log.warning("child_given_up", name=child.program.name, status=status, last=last)
        elif not self.failed.done():
            self.failed.set_exception(
                ChildFailed(f"{child.program.name} ended with status {status}: {last}")
            )


def last_line(path: Path) -> str:
    with contextlib.suppress(OSError, IndexError):
        return path.read_text(errors="replace").strip().splitlines()[-1][:500]
    return f"see {path}"


def _signal(child: Child, signum: int) -> None:
    if child.process is not None and child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(signum)


def die_with_parent() -> None:
    """Ask Linux, between fork and exec, to kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
