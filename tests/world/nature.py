"""What the world gives its processes in place of this machine: clocks, chance, threads and a log.

Whatever is random in a process follows from the world's seed, its name and how often it was
started; so does what it reads from a clock. Nothing here is known to the services.
"""

import asyncio
import builtins
import contextlib
import gc
import os
import random
import secrets
import socket
import ssl
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import cache, partial
from random import Random
from typing import Any
from unittest.mock import patch

import redis.utils
import structlog

from services.scheduler.shell import lease
from shared import limits
from shared.errors import Unavailable
from shared.process import libraries, service, worker
from shared.process.watchdog import Watchdog
from tests.world.loop import Killed, Process, WorldLoop, current, loop_of_world

EPOCH = 1_800_000_000.0
"""Unix seconds at which every world begins."""
_create_context = cache(ssl.create_default_context)
"""It takes 20 ms, and nothing here is encrypted."""

_TIMEOUTS: Any = vars(asyncio.timeouts)["_State"]
Say = Callable[[str, MutableMapping[str, Any]], None]


@contextlib.contextmanager
def in_world(loop: WorldLoop, seed: int, say: Say) -> Iterator[None]:
    """Let everything in the block live in a world; ``say`` gets what its processes log."""
    outside = Random(f"{seed}/outside")

    def chance() -> Random:
        process = current()
        return outside if process is None else process.random

    with contextlib.ExitStack() as stack:
        natural = [*_clocks(loop), *_chances(chance), *_processes(), *_machine()]
        for module, name, value in natural:
            stack.enter_context(patch.object(module, name, value))
        before = structlog.get_config()
        structlog.configure(
            processors=[_teller(say)], logger_factory=structlog.ReturnLoggerFactory()
        )
        stack.callback(structlog.configure, **before)
        yield


def _clocks(loop: WorldLoop) -> list[tuple[Any, str, Any]]:
    def unix() -> float:
        process = current()
        return EPOCH + loop.now + (0.0 if process is None else process.clock_offset)

    return [
        (time, "monotonic", lambda: loop.now),
        (time, "perf_counter", lambda: loop.now),
        (time, "monotonic_ns", lambda: int(loop.now * 1e9)),
        (time, "thread_time", lambda: 0.0),
        (time, "time", unix),
        (time, "time_ns", lambda: int(unix() * 1e9)),
    ]


def _chances(chance: Callable[[], Random]) -> list[tuple[Any, str, Any]]:
    def token(size: int | None = None) -> bytes:
        return chance().randbytes(size or 32)

    return [
        (uuid, "uuid4", lambda: uuid.UUID(int=chance().getrandbits(128), version=4)),
        (secrets, "token_bytes", token),
        (secrets, "token_hex", lambda size=None: token(size).hex()),
        (secrets, "token_urlsafe", lambda size=None: token(size).hex()),
        (secrets, "randbits", lambda bits: chance().getrandbits(bits)),
        (secrets, "randbelow", lambda limit: chance().randrange(limit)),
        (os, "urandom", token),
        (random, "random", lambda: chance().random()),
        (random, "uniform", lambda low, high: chance().uniform(low, high)),
        (random, "shuffle", lambda items: chance().shuffle(items)),
    ]


def _processes() -> list[tuple[Any, str, Any]]:
    """A process here is no process of this machine: it ends, and is watched, in another way."""
    return [
        (Watchdog, "start", _watch),
        (os, "_exit", lambda status: _end()),
        (Unavailable, "noticed_at", Unavailable.noticed_at),  # afterwards as before
        (os, "kill", lambda pid, signum: _end()),
        (service, "freeze_gc", lambda: None),
        (gc, "freeze", lambda: None),
        (gc, "collect", lambda *_: 0),
    ]


def _machine() -> list[tuple[Any, str, Any]]:
    """All machines that a world runs on look like this one."""
    return [
        (ssl, "create_default_context", _create_context),
        (socket, "gethostname", lambda: "machine"),
        (lease, "_boot", lambda: "boot"),
        (lease, "_namespace", lambda: "namespace"),
        (lease, "_started", lambda pid: "started"),
        (redis.utils, "get_lib_version", lambda: "8"),  # looks through all packages
        *((module, "versions", lambda: {"python": "3"}) for module in (libraries, worker)),
        (asyncio, "wait_for", _wait_for),
        (asyncio.Timeout, "__aenter__", _enter_timeout),
        (asyncio.Timeout, "__aexit__", _leave_timeout),
        (asyncio, "gather", partial(_gather, asyncio.gather)),
        (builtins, "sum", _sum),
    ]


def _sum(values: Iterable[Any], start: Any = 0) -> Any:
    """Add one after the other; from 3.12 on Python makes good what floats lose."""
    for each in values:
        start = start + each
    return start


def _gather(gather: Callable[..., Any], *awaitables: Any, **options: Any) -> Any:
    """Take a turn for those that are done as well; from 3.12 on Python takes none."""

    async def result_of(future: Any) -> Any:
        return await future

    def is_done(each: Any) -> bool:
        return asyncio.isfuture(each) and each.done()

    return gather(*(result_of(a) if is_done(a) else a for a in awaitables), **options)


async def _wait_for(awaitable: Any, timeout: float | None) -> Any:  # noqa: ASYNC109 -- as Python
    """Do what Python does from 3.12 on; 3.11 makes a task, so that callbacks differ in number."""
    if timeout is None or timeout > 0:
        async with asyncio.timeout(timeout):
            return await awaitable
    future = asyncio.ensure_future(awaitable)
    if not future.done():
        future.cancel()
        await asyncio.wait([future])
    try:
        return future.result()
    except asyncio.CancelledError as error:
        raise TimeoutError from error


async def _enter_timeout(self: Any) -> Any:
    """Do what Python does from 3.11.4 on: the clean-up of a cancelled task has timeouts, too."""
    self._task = asyncio.current_task()
    self._num_cancelled = self._task.cancelling()
    self._state = _TIMEOUTS.ENTERED
    self.reschedule(self._when)
    return self


async def _leave_timeout(self: Any, kind: Any, error: Any, _: Any) -> None:
    if self._timeout_handler is not None:
        self._timeout_handler.cancel()
    if self._state is not _TIMEOUTS.EXPIRING:
        self._state = _TIMEOUTS.EXITED
        return
    self._state = _TIMEOUTS.EXPIRED
    is_ours = self._task.uncancel() <= self._num_cancelled
    if is_ours and kind is not None and issubclass(kind, asyncio.CancelledError):
        raise TimeoutError from error


def _end() -> None:
    """End the process that runs, where it stands."""
    process = current()
    assert process is not None
    process.kill()
    raise Killed


def _watch(self: Watchdog) -> None:
    """Look once a second, as the thread does."""
    loop, process = loop_of_world(), current()
    last = loop.now

    def look() -> None:
        nonlocal last
        seconds, last = loop.now - last, loop.now
        self.look(seconds, outage=loop.now - Unavailable.noticed_at < limits.OUTAGE_GRACE_S)
        loop.call_later(self.look_s, look)

    assert process is not None
    loop.call_later(self.look_s, look)


def _teller(say: Say) -> Callable[..., str]:
    def tell(_: Any, level: str, event: MutableMapping[str, Any]) -> str:
        say(level, event)
        return ""

    return tell


def begun(seed: int, name: str, number: int) -> Process:
    """Return the ``number``-th start of a process."""
    return Process(name, Random(f"{seed}/{name}/{number}"))
