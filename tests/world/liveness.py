"""Whether somebody says why a run stands still: seen at its devices and in its log.

If a batch is open and no device works for ten seconds, an alarm has to say why. A scheduler that
has to take over, or workers that have yet to be missed, take some seconds more (`LATE_S`).
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from bench.cluster.hold import Held
from bench.runner.figures import Use
from services.scheduler import limits
from shared.run.log import Log
from shared.run.log_entries import Alarm, PhaseChange
from tests.world.draws import RUN
from tests.world.loop import Process, current
from tests.world.world import World

LATE_S = 15.0
"""Of a lease 3 s, of a lost worker 5 s, and of reading a run and storing what is told, the rest."""
RUNS = "running"
OF_SLOTS = ("generate", "train", "score")
"""What a device does that has the recipe's deadline. For other work it follows from how long that
took before, and is half an hour for the first."""


@dataclass(slots=True)
class Liveness:
    world: World
    violations: list[str] = field(default_factory=list)
    _at_work: dict[int, Process] = field(default_factory=dict)
    """Processes whose devices are held, by the number of the piece of work."""
    _done: set[tuple[Process, str]] = field(default_factory=set)
    """Processes whose devices have done something, with what it was."""
    _since: float = 0.0
    """When a device was last seen at work, or a version was committed."""
    _versions: int = 0
    _numbers: int = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Know what each device of the world does; one that hangs does it for ever."""
        hold = Held.hold

        async def held(device: Held, seconds: float, use: Use, **named: Any) -> float:
            process = current()
            assert process is not None
            self._numbers += 1
            number = self._numbers
            self._at_work[number] = process
            try:
                if process.has_hung_device and (use in OF_SLOTS or (process, use) in self._done):
                    await asyncio.Event().wait()
                taken = await hold(device, seconds, use, **named)
                self._done.add((process, use))
                return taken
            finally:
                self._since = self.world.loop.now
                del self._at_work[number]

        with patch.object(Held, "hold", held):
            yield

    def begin(self) -> None:
        """Nothing fails from now on."""
        self._since = self.world.loop.now

    async def look(self) -> None:
        world = self.world
        for number, process in list(self._at_work.items()):
            if process.state == "dead":
                del self._at_work[number]
        if self._at_work or world.num_commits != self._versions:
            self._versions, self._since = world.num_commits, world.loop.now
        idle = world.loop.now - self._since
        if not self._versions or idle < limits.MAX_IDLE_S:
            return
        if await self.is_said():  # an alarm ends for a moment when devices try again
            self._since = world.loop.now - limits.MAX_IDLE_S
        elif idle >= limits.MAX_IDLE_S + LATE_S:
            self._since = world.loop.now
            self.violations.append(f"no device has worked for {idle:.0f} s, and no alarm says why")

    async def says_soon(self, reason: str = "") -> bool:
        """Whether what `is_said` asks is so, or becomes so."""
        for _ in range(int(limits.MAX_IDLE_S + LATE_S)):
            if await self.is_said(reason):
                return True
            await asyncio.sleep(1.0)
        return False

    async def is_said(self, reason: str = "") -> bool:
        """Whether an alarm fires for that reason; without one, any, or whether the run has failed,
        is paused or at its end."""
        phase, said, log = None, set[str](), Log.of_run(self.world.judging, RUN)
        await log.look()
        for entry in log.newest_first:
            if isinstance(entry, PhaseChange) and phase is None:
                phase = entry.phase
                if phase != RUNS:
                    return not reason
            if isinstance(entry, Alarm) and entry.what not in said:
                if entry.firing and reason in (entry.reason or ""):
                    return True
                said.add(entry.what)
        return False
