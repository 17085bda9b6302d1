"""Measures what a storm costs: seconds until another scheduler commands, memory and descriptors."""

import asyncio
import contextlib
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.storm.cluster import Child, Cluster

LOOK_S = 5.0
GROWN_UP_S = 10.0
"""Age from which a process's memory counts: before, it still grows into its work."""
WARM_SHARE = 0.2
"""Share of the storm in which things warm up."""
TAKEOVER_LOOK_S = 0.05
LONGEST_TAKEOVER_S = 60.0
PAGE = os.sysconf("SC_PAGE_SIZE")
SCHEDULERS = ("scheduler", "scheduler-1")


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    """Seconds since the beginning."""
    resident: int
    """Bytes of memory."""
    descriptors: int


@dataclass(slots=True)
class Usage:
    """What each process takes, over its restarts."""

    samples: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    _began: float = field(default_factory=time.monotonic)
    _born: dict[int, float] = field(default_factory=dict)

    async def watch(self, run: Cluster, over: asyncio.Event) -> None:
        while not over.is_set():
            for child in list(run.children.values()):
                self._look(child)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await over.wait()

    def _look(self, child: Child) -> None:
        pid, now = child.process.pid, time.monotonic()
        if pid is None:
            return
        born = self._born.setdefault(pid, now)
        if now - born < GROWN_UP_S:
            return
        with contextlib.suppress(OSError, IndexError, ValueError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            self.samples[child.name].append(Sample(now - self._began, pages * PAGE, files))

    def lines(self) -> Iterator[str]:
        """Yield, for each process, its memory after the warm-up and at the end, and its files."""
        end = time.monotonic() - self._began
        for name, samples in sorted(self.samples.items()):
            warm = [each for each in samples if each.at >= WARM_SHARE * end]
            half = (WARM_SHARE + 1) / 2 * end
            early = [each.resident for each in warm if each.at < half]
            late = [each.resident for each in warm if each.at >= half]
            if not early or not late:
                continue
            before, after = statistics.median(early), statistics.median(late)
            files, grown = [each.descriptors for each in warm], 100 * (after / before - 1)
            yield (
                f"{name}: {before / 2**20:.1f} MiB, then {after / 2**20:.1f} MiB ({grown:+.1f} %); "
                f"{statistics.median(files):.0f} descriptors, at most {max(files)}, of "
                f"{len(samples)} looks"
            )


@dataclass(frozen=True, slots=True)
class Takeover:
    fault: str
    seconds: float
    alone: bool
    """Whether nothing else was disturbed meanwhile that a takeover needs."""


@dataclass(slots=True)
class Takeovers:
    """How long nobody commanded."""

    found: list[Takeover] = field(default_factory=list)
    disturbed_until: float = 0.0
    """Monotonic time until which a broker, or another scheduler, is disturbed."""

    async def commanding(self, run: Cluster) -> str | None:
        """Return the scheduler that commands at this moment."""
        for name in SCHEDULERS:
            if name in run.children and (await run.status(name))[0] == 200:
                return name
        return None

    def disturb(self, seconds: float) -> None:
        self.disturbed_until = max(self.disturbed_until, time.monotonic() + seconds)

    async def wait(self, run: Cluster, fault: str, lost: str) -> None:
        """Note the seconds until another scheduler, or this one's next start, commands."""
        began, pid = time.monotonic(), run.children[lost].process.pid
        while time.monotonic() < began + LONGEST_TAKEOVER_S:
            for name in SCHEDULERS:
                if (await run.status(name))[0] != 200:
                    continue
                now = time.monotonic()
                if name != lost or run.children[lost].process.pid != pid:
                    self.found.append(Takeover(fault, now - began, began > self.disturbed_until))
                return
            await asyncio.sleep(TAKEOVER_LOOK_S)
