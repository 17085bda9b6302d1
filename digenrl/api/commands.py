"""Runs commands of `digenrl` in processes of their own, after everything else on this host."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping

from fastapi import HTTPException

from shared.process.linux import die_with_parent

EXIT_REFUSED = 2
"""Exit status of a command whose options do not fit."""


async def run_command(*words: str, environment: Mapping[str, str], limit_s: float) -> str:
    """Return what a command prints.

    Raises:
        HTTPException: if the command fails, or takes longer than ``limit_s``.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "digenrl", *words, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=dict(environment),
        preexec_fn=_after_all_else if sys.platform == "linux" else None,
    )  # fmt: skip
    try:
        async with asyncio.timeout(limit_s):
            output, errors = await process.communicate()
    except TimeoutError:
        raise HTTPException(503, f"no {words[0]} within {limit_s:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"`digenrl {words[0]}` says more"
        raise HTTPException(409 if process.returncode == EXIT_REFUSED else 503, reason)
    return output.decode()


def _after_all_else() -> None:
    """Ends this process with its parent, and gives other processes of the host precedence."""
    die_with_parent()
    os.nice(10)  # with 19, an export took 88 s instead of 6 beside three busy processes
