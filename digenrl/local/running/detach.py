"""Lets a run outlive the terminal, or the ssh session, in which it was started."""

import os
import signal
import time
from collections.abc import Iterator

from digenrl.local.checking.preflight import LocalRun
from digenrl.local.limits import DETACH_POLL_S
from digenrl.local.runs import STATE_JSON, runs_folder
from shared.errors import DigenRLError


def detach(local: LocalRun) -> int:
    """Continue in another process, which has no terminal; return its number, and there 0."""
    if process := os.fork():
        return process
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with local.output.open("ab") as output, open(os.devnull, "rb") as nothing:  # noqa: PTH123
        for number, file in enumerate((nothing, output, output)):
            os.dup2(file.fileno(), number)
    return 0


def hints(local: LocalRun, process: int) -> Iterator[str]:
    """Wait until the run responds, and show how to follow, stop and resume it.

    Raises:
        DigenRLError: if its process ends before.
    """
    folder, began = local.folder, time.time()
    name = folder.name if folder.parent == runs_folder().resolve() else str(folder)
    while not (folder / STATE_JSON).exists() or (folder / STATE_JSON).stat().st_mtime < began:
        if os.waitpid(process, os.WNOHANG) != (0, 0):
            raise DigenRLError(f"the run has ended; see {local.output}")
        time.sleep(DETACH_POLL_S)
    yield f"run {name} is in progress in process {process}, which outlives this session"
    yield f"follow it: digenrl watch {name}; its page: digenrl view {name}; output: {local.output}"
    yield f"stop it: digenrl stop {name}"
    yield f"resume it: {local.again}"
