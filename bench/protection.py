"""What security and fsync cost: a batch of an emulated cluster with both, and with neither.

With both, brokers are those of `digenrl up`: a user with its own rights for each role, NATS and
Redis that flush what they acknowledge, and objects that are flushed to a disk. With neither, one
user may do everything, nothing is flushed, and objects are files in memory. On one host neither
speaks TLS, which `digenrl up` has only between hosts.
"""

import asyncio
import contextlib
import shutil
import statistics
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.cluster.case import Case
from bench.cluster.measured import measure
from bench.cluster.session import MEMORY, run
from bench.runner.rounds import by_turns
from bench.runner.session import Session, open_session
from digenrl.local.brokers.embedded import Program

UNFLUSHED = {"sync_interval: always": "sync_interval: 2m", "appendfsync always": "appendfsync no"}
"""What the configurations of NATS and Valkey say -> what they say without fsync."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a batch, at full scale, one figure per pair of runs."""

    protected: list[float]
    bare: list[float]

    @property
    def shares(self) -> list[float]:
        """Share by which a batch is longer with security and fsync, of each pair."""
        pairs = zip(self.protected, self.bare, strict=True)
        return [protected / bare - 1 for protected, bare in pairs]

    def line(self) -> str:
        shares = self.shares
        return (
            f"with security and fsync {statistics.median(self.protected):.2f} s per batch, without "
            f"{statistics.median(self.bare):.2f} s: {statistics.median(shares):+.2%} (median of "
            f"{len(shares)} pairs, {min(shares):+.2%} to {max(shares):+.2%})"
        )


def unflushed(program: Program) -> Program:
    """Have a broker acknowledge what it has not flushed, by its configuration, a file."""
    path = program.config
    assert path is not None
    text = path.read_text()
    found = [old for old in UNFLUSHED if old in text]
    assert found, f"{path} does not say when it flushes"
    for old in found:
        text = text.replace(old, UNFLUSHED[old])
    path.write_text(text)
    return program


@contextlib.asynccontextmanager
async def brokers(parent: Path, *, protected: bool) -> AsyncIterator[Session]:
    """Start brokers with security and fsync, or without; nothing of them is left."""
    folder = Path(tempfile.mkdtemp(prefix="protection-", dir=parent))
    memory = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(
        prefix="digenrl-bench-", dir=parent if protected else memory, ignore_cleanup_errors=True
    ) as objects:
        place = (lambda program: program) if protected else unflushed
        opened = open_session(folder, folder, objects=Path(objects), place=place, by_role=protected)
        async with opened as session:
            yield session
    shutil.rmtree(folder, ignore_errors=True)


def compare(case: Case, folder: Path, console: Console) -> Cost:
    """Measure pairs of runs by turns."""
    folder.mkdir(parents=True, exist_ok=True)

    async def measured(protected: bool, number: int) -> float:
        [mode] = case.modes
        warm_up, last = case.length(mode)
        async with brokers(folder, protected=protected) as session:
            record = await run(session, case.setting(mode, number), warm_up, last, lambda _: None)
        seconds = case.scale * measure(record, warm_up, last).step_seconds
        name = "with security and fsync" if protected else "without"
        console.print(f"round {number + 1}, {name}: {seconds:.2f} s per batch", highlight=False)
        return seconds

    found = dict(asyncio.run(by_turns((True, False), case.rounds, measured)))
    return Cost(protected=found[True], bare=found[False])
