"""Starts the object store of a run of `digenrl up` for as long as a command needs it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from digenrl.local.brokers.embedded import plan_brokers
from digenrl.local.limits import BROKER_STOP_S
from digenrl.local.processes.child_logs import reason_in
from digenrl.local.processes.program import Program, rejection, wait_ready
from digenrl.local.runs import Run, RunInProgress, lock_run, noted_store, read_store_note
from digenrl.local.secrets.keys import load_keys
from shared.errors import Unavailable
from shared.process.linux import die_with_parent
from shared.process.settings import Endpoints
from shared.store import ObjectStore, open_store

STORE = "objects"


@contextmanager
def run_store(run: Run, *, reads: bool = False) -> Iterator[ObjectStore]:
    """Open the store of a run, and name it in the environment of this process; start it if it is in
    the run's folder.

    If another command has started it, such as `digenrl view`, its store is used; a command that
    only reads commits uses the store of a run in progress as well.

    Raises:
        UserError: if the run is in progress.
    """
    named = {"DIGENRL_STORE_URL": run.store_url} if run.store_url else {}
    given = local_store(run, reads=reads) if run.is_local else nullcontext(named)
    with given as variables, _environment(variables):
        yield open_store(Endpoints().store)


@contextmanager
def local_store(run: Run, *, reads: bool = False) -> Iterator[dict[str, str]]:
    """Start the store of a local run as `run_store` does; yield the variables that name it."""
    folder = run.folder
    try:
        lock = lock_run(folder.parent, folder.name)
    except RunInProgress as error:
        yield _started_by_another(folder, error, reads=reads)
        return
    with lock:
        brokers = plan_brokers(folder.resolve(), load_keys(folder))
        named = brokers.environment | brokers.secrets["client"] | brokers.owner
        [store] = [program for program in brokers.programs if program.name == STORE]
        process, log, log_size = _start(store, folder / "logs" / f"{STORE}.log")
        try:
            death = partial(_death, store, process, log, log_size)
            asyncio.run(wait_ready(store, death=death))
            with noted_store(folder, named, is_live=False):
                yield named
        finally:
            _end(process)
            store.ended()


def _start(store: Program, log: Path) -> "tuple[subprocess.Popen[bytes], Path, int]":
    """Start the store; return its process, its log, and the log's size before."""
    with log.open("ab") as file:
        log_size = file.tell()
        process = subprocess.Popen(
            store.argv,
            stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            env={**os.environ, **store.environment},
            start_new_session=True,  # Ctrl-C ends the command, which then stops the store
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )  # fmt: skip
    return process, log, log_size


def _started_by_another(folder: Path, error: RunInProgress, *, reads: bool) -> dict[str, str]:
    """Return the variables that name the store that another process has started for a run.

    Raises:
        RunInProgress: if none has, or its run is in progress and the caller does more than read.
    """
    note = read_store_note(folder)
    if note is None or (note.is_live and not reads):
        raise error from None
    return note.named


@contextmanager
def _environment(named: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(named)
    try:
        yield
    finally:
        for name in named:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in named if name in before})


def _death(
    program: Program, process: "subprocess.Popen[bytes]", log: Path, log_size: int
) -> Exception | None:
    """Return why the process has ended; None while it runs."""
    if process.poll() is None:
        return None
    why = f"{program.name} ended with status {process.returncode}: {reason_in(log)}"
    return rejection(program, log, log_size) or Unavailable(why)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(BROKER_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
