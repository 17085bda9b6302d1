"""Tries all the time whether the object store and Redis take what is written.

With a full disk both still respond and read; writers wait, and continue by themselves once there is
space. The condition has to be reported so that a person frees space: a probe object is written for
that.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import structlog
from redis.exceptions import RedisError

from services.scheduler import limits
from shared.errors import Unavailable
from shared.run.layout import room_key
from shared.run.versions import VersionIndex
from shared.store import ObjectStore

STORE, REDIS = "store_takes_nothing", "redis_takes_nothing"
REMEDIES = {
    STORE: (
        "the object store takes nothing ({}): make room on its disk (df -h there; `digenrl gc` "
        "deletes what no run needs); the run then goes on by itself"
    ),
    REDIS: (
        "Redis takes nothing ({}): make room on the disk of its dir, and start it if it has ended "
        "(digenrl up does so; systemctl start redis; docker compose up -d redis); the run then "
        "goes on by itself"
    ),
}
"""Text of each alarm, with the newest error."""

log = structlog.get_logger()


@dataclass(slots=True)
class DiskWatch:
    store: ObjectStore
    index: VersionIndex
    run_name: str
    reasons: dict[str, str] = field(default_factory=lambda: dict.fromkeys(REMEDIES, ""))
    """Text of each alarm; empty while writes succeed."""

    async def run(self) -> None:
        """Probe without end."""
        async with asyncio.TaskGroup() as tasks:
            for what, attempt in self._attempts.items():
                tasks.create_task(self._look(what, attempt))

    @property
    def _attempts(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        return {
            STORE: lambda: self.store.write(room_key(self.run_name), b"room"),
            REDIS: self.index.try_to_write,
        }

    async def _look(self, what: str, attempt: Callable[[], Awaitable[None]]) -> None:
        failing_since: float | None = None
        while True:
            began = time.monotonic()
            error = await _failure(attempt)
            if not error:
                failing_since = None
            elif failing_since is None:
                failing_since = began
            is_silent = (
                failing_since is not None
                and time.monotonic() - failing_since >= limits.STORE_ALARM_DELAY_S
            )
            self._say(what, REMEDIES[what].format(error) if is_silent else "")
            await asyncio.sleep(limits.PROBE_INTERVAL_S)

    def _say(self, what: str, reason: str) -> None:
        if reason and not self.reasons[what]:
            log.error(what, reason=reason)
        self.reasons[what] = reason


async def _failure(attempt: Callable[[], Awaitable[None]]) -> str:
    """Return why nothing was taken; empty if something was."""
    try:
        async with asyncio.timeout(limits.PROBE_TIMEOUT_S):
            await attempt()
    except TimeoutError:
        return f"no answer for {limits.STORE_ALARM_DELAY_S:.0f} s"
    except (Unavailable, RedisError, OSError) as error:
        return str(error)[:500]
    return ""
