"""Imports the libraries of a run's services once, and forks a process for each request.

`Starter` (starter.py) begins this process and asks it over a socket. It has one thread and touches
no GPU, because neither threads nor a GPU's state survive a fork: where a library has begun either
while it was imported, this process ends, and nothing is forked.

A child's own parent ends at once, so that Linux gives it to the process that asks. The requesting
process receives its exit status, and ends it when it ends itself, as if it had started it. A
starter that dies ends no other process.
"""

import ctypes
import gc
import json
import os
import runpy
import select
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TextIO, cast

from shared.process.linux import die_with_parent

EXIT_UNFIT = 3
"""Exit status of a starter whose libraries have begun threads or a GPU."""
MAX_REQUEST_BYTES = 1 << 20
TITLE_BYTES = 1024
"""Bytes that the starter's command line keeps free for the longer ones of its children."""
GPU_FILES = ("/dev/nvidia-uvm", "/dev/kfd")
"""Files that CUDA and ROCm hold open once they are initialised."""
COMMAND_LINE = slice(45, 47)
"""Fields of /proc/self/stat, counted from the one after the name, with the location of the command
line in memory (48 and 49 in proc_pid_stat(5))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """Asks for a process."""

    number: int
    argv: list[str]
    """Python, ``-m``, a module, and its arguments."""
    environment: dict[str, str]
    stage: int
    """Number of stages of imports that it waits for."""
    files: list[int]
    """Destination of its output and its errors."""


@dataclass(slots=True)
class StarterProcess:
    line: socket.socket
    parent: int
    """Process that asks, and gets the children."""
    waiting: list[ForkRequest] = field(default_factory=list)

    def work(self, stages: Sequence[Sequence[str]]) -> ForkRequest:
        """Import the modules of the stages, and fork requested processes until the requesting
        process has closed its end, which ends this one. It returns in the children: with what they
        are to be.
        """
        for stage, names in enumerate(stages):
            for name in names:
                import_ahead(name)
                self._receive(wait=False)
                if (request := self._fork_waiting(stage)) is not None:
                    return request
        while True:
            if (request := self._fork_waiting(len(stages))) is not None:
                return request
            self._receive(wait=True)

    def _receive(self, *, wait: bool) -> None:
        """Take in all requests that have come, and at least one with ``wait``."""
        while select.select([self.line], [], [], None if wait else 0)[0]:
            data, files, _, _ = socket.recv_fds(self.line, MAX_REQUEST_BYTES, 2)
            if not data:
                sys.exit()
            self.waiting.append(ForkRequest(**json.loads(data), files=files))
            wait = False

    def _fork_waiting(self, stage: int) -> ForkRequest | None:
        """Fork for every request that waits for no later stage; returned in each child."""
        for request in [each for each in self.waiting if each.stage <= stage]:
            check_fit()
            gc.freeze()  # what is imported is not looked through again, which would copy its pages
            child = fork_orphan(self.parent)
            if child == 0:
                self.line.close()
                return request
            self.waiting.remove(request)
            for file in request.files:
                os.close(file)
            say(f"forked {child}: {' '.join(request.argv[2:])}")
            self.line.send(json.dumps({"number": request.number, "pid": child}).encode())
        return None


def import_ahead(name: str) -> None:
    """Import a module, or what ``module:attribute`` names; what fails is imported by its user."""
    try:
        resolve_name(name)
    except Exception as error:
        say(f"{name} is not imported ahead: {error!r}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def check_fit() -> None:
    """End this process if a fork of it could hang, or could not use its GPU."""
    threads = [(each / "comm").read_text().strip() for each in Path("/proc/self/task").iterdir()]
    descriptors = {os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()}
    if len(threads) > 1 or descriptors & set(GPU_FILES):
        several = f"{len(threads)} threads ({', '.join(threads)})"
        cause = several if len(threads) > 1 else "an initialised GPU"
        say(f"nothing is forked: the libraries have begun {cause}")
        os._exit(EXIT_UNFIT)  # which waits for no thread


def fork_orphan(parent: int) -> int:
    """Fork a process that is a child of ``parent``, an ancestor that adopts orphans. Returns its
    process id, and 0 in the child itself, which leads a session of its own."""
    answers, says = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        try:
            child = os.fork()
        except OSError:
            os._exit(1)
        if child:
            os.write(says, child.to_bytes(8))
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.0005)
        die_with_parent()
        if os.getppid() != parent:  # it has ended meanwhile
            os._exit(1)
        os.setsid()
        for end in (answers, says):
            os.close(end)
        return 0
    os.waitpid(between, 0)
    os.close(says)
    child = int.from_bytes(os.read(answers, 8))
    os.close(answers)
    if child == 0:
        raise OSError("cannot fork: too many processes, or no memory")
    return child


def become(request: ForkRequest) -> None:
    """Run the requested command line in this process, as Python would."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, number in zip([nothing, *request.files], range(3), strict=True):
        os.dup2(file, number)
        os.close(file)
    cast(TextIO, sys.stdout).reconfigure(line_buffering=os.isatty(1))  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(request.environment)
    take_own_randomness()
    set_title(request.argv)
    sys.orig_argv[:] = request.argv
    sys.argv[1:] = request.argv[3:]
    gc.enable()
    runpy.run_module(request.argv[2], run_name="__main__", alter_sys=True)


def take_own_randomness() -> None:
    """Seed again the generators that Python does not seed after a fork."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def set_title(argv: Sequence[str]) -> None:
    """Show ``argv`` as this process's command line, as far as space permits."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(address) for address in fields[COMMAND_LINE])
    title = b"".join(os.fsencode(part) + b"\0" for part in argv)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, title, len(title))


def main() -> None:
    """Begin with ``FILE PARENT STAGES ROOM``: an inherited socket, the process at its other end,
    and a JSON list of lists of modules."""
    file, parent, stages = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    die_with_parent()
    set_title(["digenrl", "starter"])
    gc.disable()
    become(StarterProcess(socket.socket(fileno=file), parent).work(stages))


if __name__ == "__main__":
    main()
