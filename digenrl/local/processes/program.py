"""A child process, its readiness check, and whether it rejects its configuration."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio as redis
from obstore.exceptions import BaseError

from digenrl.local.limits import READY_POLL_S, READY_S, READY_TIMEOUT_S
from shared.cancellation import cancellable
from shared.errors import Unavailable, UserError

REJECTIONS = (
    r"at line (?P<line>\d+)\n>>> .*\n(?P<why>.+)",  # Valkey
    r"nats-server: (?:.*?(?:line |:)(?P<line>\d+)(?::\d+)?: )?(?P<why>.+)",
    r"F\d{4} \S+ \S+ (?P<why>.*(?:config|\.sock).*)",  # SeaweedFS
)
"""Output of brokers that end because of their configuration."""


async def nothing() -> None:
    """Ends at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A child process: how to start it, and how to check that it responds."""

    name: str
    argv: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready: Callable[[], Awaitable[bool]] = lambda: asyncio.sleep(0, result=True)
    config: Path | None = None
    """File of its configuration."""
    upkeep: Callable[[], Coroutine[Any, Any, None]] = nothing
    """Looks after it, and is cancelled when it ends."""
    ended: Callable[[], None] = lambda: None
    """Clears away what it leaves outside its folder, once it has ended."""
    optional: bool = False
    """Whether the other processes continue if this one keeps failing."""
    may_finish: bool = False
    """Whether status 0 means that the program is finished; it is then not started again."""
    reports_work: bool = False
    """Whether `Supervisor.record_work` receives the program's work. Then only work resets the count
    of deaths; running time does not, because loading a model may take minutes."""


def rejection(program: Program, log: Path, num_bytes: int) -> UserError | None:
    """Return the error of a program that has ended because of its configuration, if it has.
    ``log`` has what it printed, after ``num_bytes`` bytes of earlier starts."""
    if program.config is None:
        return None
    output = log.read_bytes()[num_bytes:].decode(errors="replace")
    match = next(filter(None, (re.search(each, output) for each in REJECTIONS)), None)
    if match is None:
        return None
    line = match.groupdict().get("line")
    at = f"{program.config}, line {line}" if line else f"{program.config}"
    return UserError(
        f"{program.name} rejects its configuration {at}: {match['why']}; choose another folder, "
        "`digenrl doctor --runs FOLDER` tries one"
    )


async def is_ready(url: str) -> bool:
    """Return whether a service of this machine can do its work."""
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(f"{url}/readyz")).status_code == 200


async def wait_ready(
    program: Program,
    *,
    seconds: float = READY_S,
    death: Callable[[], Exception | None] = lambda: None,
) -> None:
    """Wait until the program answers; raises Unavailable if it does not answer in time, and what
    ``death`` returns once it has ended."""
    deadline = time.monotonic() + seconds
    last: Exception | None = None
    while time.monotonic() < deadline:
        if (ended := death()) is not None:
            raise ended
        try:
            if await cancellable(asyncio.wait_for(program.ready(), READY_TIMEOUT_S)):
                return
        except (httpx.HTTPError, redis.RedisError, BaseError, OSError, Unavailable) as error:
            last = error
        except Exception as error:
            if not type(error).__module__.startswith("nats"):
                raise
            last = error
        await asyncio.sleep(READY_POLL_S)
    raise Unavailable(f"{program.name} did not answer within {seconds:.0f} s: {last!r}")
