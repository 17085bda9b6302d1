"""Starts the object store of a run of `digenrl up` for as long as a command needs it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from digenrl.local.brokers import plan_brokers, wait_ready
from digenrl.local.keys import keys_of
from digenrl.local.linux import die_with_parent
from digenrl.local.preflight import lock_run
from digenrl.local.supervisor import BROKER_STOP_S
from shared.process.settings import Endpoints

STORE = "objects"


@contextmanager
def store_of(folder: Path) -> Iterator[bool]:
    """Start the store of the run in ``folder``, and name it in the environment of this process.

    Yields False and does nothing if the environment names a store already, or the folder holds no
    run.

    Raises:
        UserError: if the run is in progress.
    """
    if "store_url" in Endpoints().model_fields_set or not (folder / "recipe.json").is_file():
        yield False
        return
    with lock_run(folder.parent, folder.name):
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
            yield True
        finally:
            for key in named:
                os.environ.pop(key, None)
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(BROKER_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
