"""Starts the object store of a run of `digenrl up` for as long as a command needs it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from digenrl.local.brokers import plan_brokers, wait_ready
from digenrl.local.keys import keys_of
from digenrl.local.linux import die_with_parent
from digenrl.local.preflight import InProgress, lock_run
from digenrl.local.runs import Run
from digenrl.local.supervisor import BROKER_STOP_S
from digenrl.local.tokens import KEYS, write_secret

STORE = "objects"
NOTE = "open-store.json"
"""File beside the keys: where a command has started the store of a run that is over."""
LIVE = "live-store.json"
"""File beside the keys: where `digenrl up` has started the store of a run in progress."""


@contextmanager
def store_of(run: Run) -> Iterator[bool]:
    """Name the store of a run in the environment of this process; start it if it is in the run's
    folder, which yields True.

    If another command has started it, such as `digenrl view`, that one's is used.

    Raises:
        UserError: if the run is in progress.
    """
    if not run.is_local:
        with _environment({"DIGENRL_STORE_URL": run.store_url} if run.store_url else {}):
            yield False
        return
    folder = run.folder
    try:
        lock = lock_run(folder.parent, folder.name)
    except InProgress as error:
        with _started_by_another(folder, NOTE, error):
            yield True
        return
    with lock:
        brokers = plan_brokers(folder.resolve(), keys_of(folder))
        named = brokers.environment | brokers.secrets["client"] | brokers.owner
        [store] = [program for program in brokers.programs if program.name == STORE]
        with (folder / "logs" / f"{STORE}.log").open("ab") as log:
            process = subprocess.Popen(
                store.argv,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, **store.environment},
                start_new_session=True,  # Ctrl-C ends the command, which then stops the store
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )  # fmt: skip
        try:
            asyncio.run(wait_ready(store))
            write_secret(folder / KEYS / NOTE, json.dumps([os.getpid(), named]))
            with _environment(named):
                yield True
        finally:
            (folder / KEYS / NOTE).unlink(missing_ok=True)
            _end(process)


@contextmanager
def store_to_read(run: Run) -> Iterator[None]:
    """Name the store of a run as `store_of` does, and that of a run in progress as well: for a
    command that only reads what is committed.

    Raises:
        UserError: if the run is in progress, and its store is not there yet, or no more.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(store_of(run))
        except InProgress as error:
            stack.enter_context(_started_by_another(run.folder, LIVE, error))
        yield


@contextmanager
def noted_store(folder: Path, named: Mapping[str, str]) -> Iterator[None]:
    """Note where the store of a run in progress is, for commands that read it meanwhile."""
    note = folder / KEYS / LIVE
    write_secret(note, json.dumps([os.getpid(), dict(named)]))
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


@contextmanager
def _started_by_another(folder: Path, note: str, error: InProgress) -> Iterator[None]:
    """Name the store that another process has started for a run and noted.

    Raises:
        InProgress: if none has.
    """
    named: dict[str, str]
    try:
        process, named = json.loads((folder / KEYS / note).read_text())
        os.kill(process, 0)  # one that was killed has left its note
    except (OSError, ValueError):
        raise error from None
    with _environment(named):
        yield


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


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(BROKER_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
