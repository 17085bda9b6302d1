"""Watches a run: the memory of all its processes together, and what each of them does.

Memory is the proportional set size that Linux keeps: a page that several processes share, such as a
mapped file, counts once in their sum.
"""

import asyncio
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from digenrl.local.secrets.tokens import Tokens
from shared.errors import UserError

SAMPLE_S, POLL_S = 3.0, 0.1
PROC = Path("/proc")
ROLES = ("rollout", "reward", "trainer", "scheduler", "report", "evaluate", "up")
OTHERS = "brokers"


@dataclass(slots=True)
class Peak:
    """The most memory that was in use, and when."""

    num_bytes: int = 0
    at_s: float = 0.0

    def note(self, num_bytes: int, at_s: float) -> None:
        if num_bytes > self.num_bytes:
            self.num_bytes, self.at_s = num_bytes, at_s


@dataclass(frozen=True, slots=True)
class Moment:
    at_s: float
    what: str


@dataclass(slots=True)
class Watched:
    """What was seen of a run; seconds count from its start."""

    total: Peak = field(default_factory=Peak)
    """Memory of all processes together."""
    roles: dict[str, Peak] = field(default_factory=lambda: defaultdict(Peak))
    """Memory by what a process is; processes of one role count together."""
    moments: list[Moment] = field(default_factory=list)
    """Changes of what a worker does, and steps of the run."""
    series: list[tuple[float, int]] = field(default_factory=list)
    """Seconds and bytes of all processes together."""
    killed: list[str] = field(default_factory=list)


async def watch(seen: Watched, root: int, url: str, tokens: Tokens, ended: asyncio.Event) -> None:
    """Watches process ``root`` and what it has started until ``ended`` is set.

    Args:
        seen: is added to.
        url: the scheduler's API, which need not answer yet, or any more.
    """
    last, began = dict[str, str](), time.monotonic()
    known: dict[int, str] = {}
    async with httpx.AsyncClient(timeout=5) as client:
        while not ended.is_set():
            now = time.monotonic() - began
            by_role = await asyncio.to_thread(memory_of, root, known)
            for role, num_bytes in by_role.items():
                seen.roles[role].note(num_bytes, now)
            seen.total.note(sum(by_role.values()), now)
            seen.series.append((round(now, 1), sum(by_role.values())))
            for name, state in (await _states(client, url, tokens)).items():
                if last.get(name) != state:
                    last[name] = state
                    seen.moments.append(Moment(round(now, 1), f"{name}: {state}"))
            await asyncio.sleep(SAMPLE_S)


@dataclass(frozen=True, slots=True)
class Kill:
    """Says which worker is killed, and after how many steps."""

    worker: str
    after: int


async def kill_worker(seen: Watched, root: int, url: str, tokens: Tokens, kill: Kill) -> None:
    """Kills a worker that ``root`` has started, with SIGKILL, once the steps are committed."""
    async with httpx.AsyncClient(timeout=5) as client:
        while not seen.killed:
            await asyncio.sleep(POLL_S)
            states = await _states(client, url, tokens)
            if not states.get("run", "").startswith(f"running, {kill.after} of"):
                continue
            for pid in family(root):
                arguments = _command(pid)
                if "--worker" in arguments and kill.worker in arguments:
                    os.kill(pid, signal.SIGKILL)
                    seen.killed.append(kill.worker)


async def _states(client: httpx.AsyncClient, url: str, tokens: Tokens) -> dict[str, str]:
    """Returns what the run and each worker do, by name; nothing while the API does not answer."""
    try:
        client.headers.update(tokens.headers("viewer"))
        run = (await client.get(f"{url}/v1/run")).raise_for_status().json()
        workers = (await client.get(f"{url}/v1/workers")).raise_for_status().json()
    except (httpx.HTTPError, UserError, ValueError):
        return {}
    return {"run": _of_run(run)} | {each["worker"]: each["activity"] for each in workers}


def _of_run(run: dict[str, Any]) -> str:
    return f"{run['phase']}, {run['step']} of {run['steps']} steps"


def memory_of(root: int, known: dict[int, str]) -> dict[str, int]:
    """Returns the bytes in use by a process and all that it has started, by role; adds to
    ``known`` the role of each process: one that ends has no command line any more."""
    found: dict[str, int] = defaultdict(int)
    for pid in family(root):
        arguments = _command(pid)
        if any(arguments):
            known[pid] = role_of(arguments)
        num_bytes = proportional_bytes(pid)
        if num_bytes:
            found[known.get(pid, OTHERS)] += num_bytes
    return dict(found)


def proportional_bytes(pid: int) -> int:
    """Returns the bytes of a process, shared pages in part; 0 if it is gone."""
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    kilobytes = next((line.split()[1] for line in lines if line.startswith("Pss:")), "0")
    return 1024 * int(kilobytes)


def role_of(arguments: list[str]) -> str:
    """Says what a process is, from its command line."""
    if "digenrl" not in " ".join(arguments[:3]) and "digenrl" not in arguments:
        return OTHERS
    return next((role for role in ROLES if role in arguments), OTHERS)


def family(root: int) -> Iterator[int]:
    """Yields a process and its descendants."""
    children = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            parent = _parent(int(entry.name))
            if parent is not None:
                children[parent].append(int(entry.name))
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += children[pid]


def _parent(pid: int) -> int | None:
    try:
        line = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    return int(line.rpartition(")")[2].split()[1])  # a name may have spaces and brackets


def _command(pid: int) -> list[str]:
    try:
        return (PROC / str(pid) / "cmdline").read_text().split("\0")
    except OSError:
        return []
