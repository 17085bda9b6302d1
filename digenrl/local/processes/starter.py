"""Starts Python processes by forking one that has their libraries already (starter_process.py).

A forked process is a child of this process like any other. Where it cannot fork, and once it has
died, processes are started in the ordinary way.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog

from digenrl.local.limits import FORK_TIMEOUT_S
from digenrl.local.processes.starter_process import EXIT_UNFIT, MAX_REQUEST_BYTES, TITLE_BYTES
from shared.errors import UserError
from shared.process.linux import adopt_orphans, die_with_parent, has_pidfds

STARTER_VARIABLE = "DIGENRL_STARTER"
"""Variable that turns the starter off."""
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Variables of every child: the working folder may hold packages with the names of ours."""
IMPORT_VARIABLES = ("DIGENRL_FAILPOINT", "PYTHONPATH")
"""Variables that our modules, or Python, read once and for all: a process that has others than the
starter is not forked from it."""

log = structlog.get_logger()


class Process(Protocol):
    """Interface of a child, however it was started."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""

    async def wait(self) -> int: ...

    def send_signal(self, signum: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class PreloadPlan:
    """Modules that are imported in advance, and processes that may then be forked."""

    light: tuple[str, ...]
    """Modules, or ``module:attribute``, of processes without a model."""
    heavy: tuple[str, ...]
    """Further imports of the others."""
    threads: int
    """Number of threads of the numerical libraries, which is read when they are imported."""
    stages: Mapping[tuple[str, ...], int]
    """Number of these tuples that a process waits for, by its module and first arguments."""

    def stage_of(self, argv: Sequence[str]) -> int | None:
        """Return the number of stages that a command line waits for; None if it is not forked."""
        if list(argv[:2]) != [sys.executable, "-m"]:
            return None
        words = tuple(argv[2:])
        return next((n for first, n in self.stages.items() if words[: len(first)] == first), None)


class ForkedProcess:
    """A child that was not started by asyncio."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._file = os.pidfd_open(pid)
        self._loop.add_reader(self._file, self._collect)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int, /) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._file, signum)

    def _collect(self) -> None:
        self._loop.remove_reader(self._file)
        os.close(self._file)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


@dataclass(slots=True)
class Starter:
    process: asyncio.subprocess.Process
    line: socket.socket
    ahead: PreloadPlan
    imported: Mapping[str, str | None]
    """Values of `IMPORT_VARIABLES` with which it imports."""
    numbers: Iterator[int] = field(default_factory=itertools.count)
    answers: "dict[int, asyncio.Future[int]]" = field(default_factory=dict)
    """Requests that are not answered."""
    reader: "asyncio.Task[None] | None" = None
    has_ended: bool = False

    @classmethod
    async def begin(
        cls, ahead: PreloadPlan, environment: Mapping[str, str], log_path: Path
    ) -> "Starter | None":
        """Begin to import, concurrently with the caller; None if forking is impossible or turned
        off.

        Args:
            environment: variables of the starter, besides the inherited ones. A forked process
                gets its own environment, but modules read these variables during their import.
        """
        if not is_wanted():
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        careful = {
            **SAFE_PATH,
            "OMP_NUM_THREADS": str(ahead.threads),
            "OPENBLAS_NUM_THREADS": "1",  # whose threads begin when it is imported
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for GPUs initialises none
        }
        with theirs, log_path.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "digenrl.local.processes.starter_process",
                str(theirs.fileno()), str(os.getpid()),
                json.dumps([ahead.light, ahead.heavy]), " " * TITLE_BYTES,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment, **careful},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=die_with_parent,
            )  # fmt: skip
        whole = {**os.environ, **environment}
        starter = cls(process, ours, ahead, {name: whole.get(name) for name in IMPORT_VARIABLES})
        starter.reader = asyncio.create_task(starter._read())
        return starter

    async def start(
        self, argv: Sequence[str], environment: Mapping[str, str], files: tuple[int, int]
    ) -> ForkedProcess | None:
        """Fork a process for a command line of Python, once what it needs is imported; None for a
        command that is not forked, or if the starter has ended.

        Args:
            environment: all its variables.
            files: destination of its output and its errors.
        """
        stage = self.ahead.stage_of(argv)
        is_alike = all(environment.get(name) == self.imported[name] for name in IMPORT_VARIABLES)
        if stage is None or self.has_ended or not is_alike:
            return None
        number = next(self.numbers)
        request = {
            "number": number,
            "argv": list(argv),
            "environment": dict(environment),
            "stage": stage,
        }
        answer = self.answers[number] = asyncio.get_running_loop().create_future()
        try:
            socket.send_fds(self.line, [json.dumps(request).encode()], files)
            return ForkedProcess(await asyncio.wait_for(answer, FORK_TIMEOUT_S))
        except TimeoutError as error:
            self._give_up(error)
        except OSError:  # it has ended, of which `_read` tells
            self.answers.pop(number, None)
        return None

    async def stop(self) -> None:
        """End the starter; its forked processes continue."""
        self.has_ended = True
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        adopt_orphans(False)
        if self.reader is not None:
            await asyncio.gather(self.reader, return_exceptions=True)
        self.line.close()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self.line, MAX_REQUEST_BYTES):
                message = json.loads(data)
                answer = self.answers.pop(message["number"], None)
                if answer is None or answer.done():  # nobody waits for it any more
                    os.kill(message["pid"], signal.SIGKILL)
                    await ForkedProcess(message["pid"]).wait()
                else:
                    answer.set_result(message["pid"])
            is_unfit = await self.process.wait() == EXIT_UNFIT
            self._give_up(ConnectionResetError("it has ended"), is_unfit=is_unfit)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError, *, is_unfit: bool = False) -> None:
        """``is_unfit``: nothing is wrong, but libraries have begun what does not survive a fork, as
        builds for GPUs may."""
        if not self.has_ended:
            hint = "processes are started in the ordinary way; starter.log may say why"
            say = log.info if is_unfit else log.warning
            say("starter_unfit" if is_unfit else "starter_lost", error=repr(error), hint=hint)
        self.has_ended = True
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(error)
        self.answers.clear()


def is_wanted() -> bool:
    """Return whether processes can be forked here, unless it is turned off.

    Raises:
        UserError: if its variable is neither on nor off.
    """
    given = os.environ.get(STARTER_VARIABLE, "on")
    if given not in ("on", "off"):
        raise UserError(f"{STARTER_VARIABLE}: {given!r} is neither on nor off")
    return given == "on" and sys.platform == "linux" and has_pidfds() and adopt_orphans(True)
