"""Runs commands of `digenrl` in processes of their own, as low in priority as the page."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Mapping

from fastapi import HTTPException

from shared.process.linux import die_with_parent

EXIT_REFUSED = 2
"""Exit status of a command whose options do not fit."""
MAX_WAITING_REQUESTS = 4
"""Requests that may wait for the one in work; a further one is refused."""


class Turns:
    """Admits one request at a time to what takes long."""

    def __init__(self) -> None:
        self._lock, self._num_waiting = asyncio.Lock(), 0

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until no other request is in work; raises HTTPException if too many wait."""
        if self._num_waiting > MAX_WAITING_REQUESTS:
            raise HTTPException(
                503, f"{MAX_WAITING_REQUESTS} requests wait already; try again later"
            )
        self._num_waiting += 1
        try:
            async with self._lock:
                yield
        finally:
            self._num_waiting -= 1


async def run_command(
    *words: str, limit_s: float, environment: Mapping[str, str] | None = None, refusal: int = 409,
    on_line: Callable[[str], None] | None = None,
) -> str:  # fmt: skip
    """Return what a command prints; ``on_line`` gets each line at once.

    Raises:
        HTTPException: if the command fails, or takes longer than ``limit_s``; with the status
            ``refusal`` if its options do not fit.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "digenrl", *words, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,
    )  # fmt: skip
    try:
        async with asyncio.timeout(limit_s):
            while on_line and process.stdout and (line := await process.stdout.readline()):
                on_line(line.decode())
            output, errors = await process.communicate()
    except TimeoutError:
        why = f"no {words[0]} within {limit_s:g} s; `digenrl {words[0]}` has no limit of time"
        raise HTTPException(503, why) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"`digenrl {words[0]}` says more"
        status = refusal if process.returncode == EXIT_REFUSED else 503
        raise HTTPException(status, reason.removeprefix("digenrl: ").removeprefix("--"))
    return output.decode()
