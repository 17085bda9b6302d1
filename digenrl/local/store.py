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
from digenrl.local.supervisor import BROKER_STOP_S
from digenrl.local.tokens import KEYS, write_secret
from shared.process.settings import Endpoints

STORE = "objects"
NOTE = "open-store.json"
"""File beside the keys: where a command has started the store of a run that is over."""
LIVE = "live-store.json"
"""File beside the keys: where `digenrl up` has started the store of a run in progress."""


@contextmanager
def store_of(folder: Path) -> Iterator[bool]:
    """Start the store of the run in ``folder``, and name it in the environment of this process.

    Yields False and does nothing if the environment names a store already, or the folder holds no
    run. If another command has started it, such as `digenrl view`, that one's is used.

    Raises:
        UserError: if the run is in progress.
    """
    if "store_url" in Endpoints().model_fields_set or not (folder / "recipe.json").is_file():
        yield False
        return
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
            os.environ.update(named)
            write_secret(folder / KEYS / NOTE, json.dumps([os.getpid(), named]))
            yield True
        finally:
            (folder / KEYS / NOTE).unlink(missing_ok=True)
            for key in named:
                os.environ.pop(key, None)
            _end(process)


@contextmanager
def store_to_read(folder: Path) -> Iterator[None]:
    """Name the store of the run in ``folder`` as `store_of` does, and that of a run in progress as
    well: for a command that only reads what is committed.

    Raises:
        UserError: if the run is in progress, and its store is not there yet, or no more.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(store_of(folder))
        except InProgress as error:
            stack.enter_context(_started_by_another(folder, LIVE, error))
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
    os.environ.update(named)
    try:
        yield
    finally:
        for key in named:
            os.environ.pop(key, None)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(BROKER_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
