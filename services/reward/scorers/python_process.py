"""A process that runs a reward function of the user's own: started, asked, and killed.

It is a process so that code which crashes, hangs or exits ends that process and nothing else.
"""

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from services.reward import limits
from services.reward.reward_file import RewardFile
from shared.errors import UserError

CHILD = Path(__file__).with_name("python_child.py")
PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that would lead from an environment of its own back into ours."""
MAX_SHOWN = 300


class RewardProcessDied(Exception):
    """The process has ended, or was killed because a call took too long; with the reason."""


class Process:
    """Is one process, from its start until it is lost."""

    def __init__(self, file: RewardFile, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [*command, str(CHILD)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment(file),
            start_new_session=True,
        )  # fmt: skip
        self._answers: queue.Queue[Any] = queue.Queue()
        assert self._process.stdin is not None and self._process.stdout is not None
        threading.Thread(
            target=_read, args=(self._process.stdout, self._answers), daemon=True
        ).start()
        self._end = weakref.finalize(self, _kill, self._process)
        self._began = time.monotonic()
        self.import_s: float | None = None
        """Seconds that the import has taken; None while it is running."""
        self._send({"path": str(file.path), "function": file.function}, file.text.encode())

    def wait_until_ready(self, seconds: float) -> bool:
        """Return whether the file is imported within this many seconds.

        Raises:
            RewardProcessDied: if it cannot be imported.
        """
        if self.import_s is None:
            try:
                message = self._answer(seconds)
            except queue.Empty:
                return False
            if "failed" in message:
                self.kill()
                raise RewardProcessDied(f"it cannot be imported: {message['failed']}")
            self.import_s = time.monotonic() - self._began
        return True

    def ask(self, header: Mapping[str, Any], data: bytes, patience: float) -> Iterator[Any]:
        """Yields the answer of each sample as it comes, each after at most ``patience`` seconds.

        Raises:
            RewardProcessDied: if the process ends or takes longer; it is killed then.
        """
        self._send(header, data)
        while True:
            try:
                message = self._answer(patience)
            except queue.Empty:
                self.kill()
                raise RewardProcessDied(
                    f"a call took more than {patience:g} s (patience)"
                ) from None
            if message.get("done"):
                return
            yield message

    def kill(self) -> None:
        self._end()

    def _answer(self, seconds: float) -> Any:
        """Raise queue.Empty without a response in time, and RewardProcessDied if the process has
        ended."""
        message = self._answers.get(timeout=seconds)
        if message is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(limits.EXIT_TIMEOUT_S)
            self.kill()
            raise RewardProcessDied(_how_it_ended(self._process.returncode))
        return message

    def _send(self, header: Mapping[str, Any], data: bytes) -> None:
        head = json.dumps({**header, "bytes": len(data)}).encode()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended: the missing answer says how
            self._process.stdin.write(len(head).to_bytes(4, "big") + head)
            self._process.stdin.write(data)
            self._process.stdin.flush()


def python_command(file: RewardFile) -> list[str]:
    """Returns the command that runs Python for the file, in an environment that is there.

    Raises:
        UserError: one line that begins with `source`, if its packages cannot be installed.
    """
    if not file.has_own_environment:
        return [sys.executable]
    command = [*_uv_run(file), "python"]
    try:
        subprocess.run(
            [*command, "-c", "import numpy"], env=_environment(file), cwd=tempfile.gettempdir(),
            capture_output=True, text=True, timeout=limits.BUILD_S, check=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(
            f"source: {file.path}: its packages were not installed within {limits.BUILD_S:g} s"
        ) from None
    except subprocess.CalledProcessError as error:
        message = " ".join(error.stderr.split())[-MAX_SHOWN:]
        raise UserError(
            f"source: {file.path}: no environment with {', '.join(file.dependencies)}: {message}"
        ) from None
    return command


def _environment(file: RewardFile) -> dict[str, str]:
    left_out = PYTHON_VARIABLES if file.has_own_environment else ()
    return {name: value for name, value in os.environ.items() if name not in left_out}


def find_uv() -> str | None:
    """Return the program that makes environments, next to this Python or on the path."""
    sibling = Path(sys.executable).with_name("uv")
    return str(sibling) if sibling.is_file() else shutil.which("uv")


def check_can_run(file: RewardFile) -> None:
    """Raises UserError if the file needs an environment of its own, and nothing here makes one."""
    if file.has_own_environment and find_uv() is None:
        raise UserError(
            f"source: {file.path} has inline metadata and needs uv for its environment; install "
            "uv, or remove the metadata and install its packages into the environment of DigenRL"
        )


def _uv_run(file: RewardFile) -> list[str]:
    check_can_run(file)
    names = ("numpy", *file.dependencies)
    version = file.python or f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = [word for name in names for word in ("--with", name)]
    uv = find_uv()
    assert uv is not None
    return [uv, "run", "--quiet", "--isolated", "--no-project", "--python", version, *packages]


def _read(stream: IO[bytes], answers: "queue.Queue[Any]") -> None:
    """Puts each line of the stream into the queue, and None at its end."""
    with contextlib.suppress(ValueError, OSError), stream:
        for line in stream:
            answers.put(json.loads(line))
    answers.put(None)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process and those that it has started, and waits for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError, ValueError):
            stream.close() if stream is not None else None


def _how_it_ended(status: int | None) -> str:
    if status is not None and status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = str(-status)
        return f"its process was ended by {name}"
    return f"its process ended with status {status}"
