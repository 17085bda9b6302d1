"""Keeps child processes running, and stops them in order.

A child that dies is restarted, after a delay that grows each time. On Linux the children also die
with this process, however it ends: an orphan would write to a run that is resumed later.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from digenrl.local.limits import CHILD_STOP_S, FIRST_BACKOFF_S, MAX_BACKOFF_S, MAX_DEATHS, STABLE_S
from digenrl.local.processes.child_logs import reason_in
from digenrl.local.processes.program import Program, rejection, wait_ready
from digenrl.local.processes.starter import SAFE_PATH, Process, Starter
from shared.errors import DigenRLError, UserError
from shared.process.linux import die_with_parent

EXIT_USER_ERROR = 2

log = structlog.get_logger()


class ChildFailed(DigenRLError):
    """Raised when a child keeps failing, or will never succeed."""


class ChildRefused(ChildFailed, UserError):
    """Raised when a child ends because of its settings, or of its host: with status 2."""


@dataclass(slots=True)
class Child:
    program: Program
    log_path: Path
    process: Process | None = None
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
    starter: Starter | None = None
    """Forks children that have their libraries already; None: Python starts all children."""
    children: dict[str, Child] = field(default_factory=dict)
    failed: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Holds the exception once a child keeps failing."""
    is_closing: bool = False
    """Children that end are not restarted: Slurm sends a stop signal to all processes at once."""

    async def start(self, program: Program, *, wait: bool = True) -> None:
        """Keep a program running, from soon on; with ``wait``, return once it answers."""
        child = Child(program, self.logs / f"{program.name}.log")
        child.log_path.touch()
        self.children[program.name] = child
        child.keeper = asyncio.create_task(self._keep(child))
        if wait:
            ready = asyncio.create_task(wait_ready(program))
            try:
                await asyncio.wait({ready, self.failed}, return_when=asyncio.FIRST_COMPLETED)
                if self.failed.done():
                    self.failed.result()
                await ready
            finally:  # also of a start that is interrupted, whose clients are closed then
                ready.cancel()
                await asyncio.gather(ready, return_exceptions=True)

    async def stop(self, names: list[str], *, seconds: float = CHILD_STOP_S) -> None:
        """Ask these children to end, wait, and kill those that are still running."""
        wanted = [self.children[name] for name in names if name in self.children]
        for child in wanted:
            child.stopping = True
            if child.keeper is not None and not _is_running(child):
                child.keeper.cancel()  # it would start the child
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

    async def finished(self, *others: "Supervisor") -> None:
        """Wait until all children have ended by themselves.

        Raises:
            ChildFailed: if a child of this or of the other supervisors keeps failing.
        """
        keepers = [child.keeper for child in self.children.values() if child.keeper]
        ends = asyncio.gather(*keepers, return_exceptions=True)
        failures: set[asyncio.Future[Any]] = {each.failed for each in (self, *others)}
        await asyncio.wait({ends, *failures}, return_when=asyncio.FIRST_COMPLETED)
        for each in failures:
            if each.done():
                each.result()

    def restart(self, name: str) -> None:
        """End a child, which is then restarted like one that has died."""
        _signal(self.children[name], signal.SIGTERM)

    def is_kept(self, name: str) -> bool:
        """Return whether the child was started and has not been given up."""
        child = self.children.get(name)
        return child is not None and child.keeper is not None and not child.keeper.done()

    def record_work(self, name: str, work: str) -> None:
        """Record that a child has done ``work``, a label that changes with each progress."""
        child = self.children.get(name)
        if child is not None and work not in child.works:
            child.works.add(work)
            child.has_worked = True

    async def launch(
        self, argv: Sequence[str], environment: Mapping[str, str], output: int | None = None
    ) -> Process:
        """Start a process, by a fork if that is possible.

        Args:
            environment: variables in addition to every child's and the inherited ones.
            output: file that it writes to; by default, what this process writes to.
        """
        whole = {**os.environ, **self.environment, **environment, **SAFE_PATH}
        if self.starter is not None:
            files = (1, 2) if output is None else (output, output)
            if (forked := await self.starter.start(argv, whole, files)) is not None:
                return forked
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=whole,
            start_new_session=True,  # Ctrl-C ends this process, which stops the others in order
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )

    async def _spawn(self, child: Child) -> Process:
        with child.log_path.open("ab") as output:
            program = child.program
            child.process = None
            child.process = await self.launch(program.argv, program.environment, output.fileno())
        return child.process

    async def _keep(self, child: Child) -> None:
        upkeep = asyncio.create_task(child.program.upkeep())
        try:
            await self._restart(child)
        except OSError as error:
            if not self.failed.done():
                self.failed.set_exception(error)
        finally:
            upkeep.cancel()

    async def _restart(self, child: Child) -> None:
        deaths = 0
        while True:
            began, log_size = time.monotonic(), child.log_path.stat().st_size
            status = await (await self._spawn(child)).wait()
            child.program.ended()
            if child.stopping or self.is_closing or (status == 0 and child.program.may_finish):
                return
            is_useful = time.monotonic() - began > STABLE_S
            if child.program.reports_work:
                is_useful, child.has_worked = child.has_worked, False
            deaths = 0 if is_useful else deaths + 1
            error = rejection(child.program, child.log_path, log_size)
            if error or status == EXIT_USER_ERROR or deaths > MAX_DEATHS:
                self._fail(child, status, error)
                return
            log.warning("child_died", name=child.program.name, status=status)
            await asyncio.sleep(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (deaths - 1)))
            child.num_restarts += 1

    def _fail(self, child: Child, status: int, error: DigenRLError | None) -> None:
        last = reason_in(child.log_path)
        if child.program.optional:
            log.warning("child_given_up", name=child.program.name, status=status, last=last)
        elif not self.failed.done():
            kind = ChildRefused if status == EXIT_USER_ERROR else ChildFailed
            why = last.removeprefix("digenrl: ")
            failed = kind(f"{child.program.name} ended with status {status}: {why}")
            self.failed.set_exception(error or failed)


def _is_running(child: Child) -> bool:
    return child.process is not None and child.process.returncode is None


def _signal(child: Child, signum: int) -> None:
    if child.process is not None and child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(signum)
