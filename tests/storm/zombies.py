"""Emulated services that stop, when a test asks for it, just before they do what lasts: a process
that goes on after it was replaced then does it late.

    role        stops before
    rollout     it publishes a fragment
    reward      it publishes scores
    encoder     it names the conditions of a prompt
    trainer     it makes a commit record
    scheduler   it publishes a command
"""

import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import services.rollout.encoder
import services.trainer.versions
from shared.bus.bus import Bus
from shared.errors import CommitConflict
from shared.messages.contracts import (
    Command,
    Event,
    FragmentGenerated,
    FragmentScored,
    GenerateFragment,
)
from shared.run.commits import commit
from shared.run.conditions import store_conditions

PUBLISHES: dict[str, type[Event | Command]] = {
    "rollout": FragmentGenerated,
    "reward": FragmentScored,
    "scheduler": GenerateFragment,
}
"""What a role publishes late."""


def ask_to_stop(folder: Path, name: str) -> None:
    """Have a process stop before the next thing that lasts."""
    (folder / f"stop-{name}").touch()


@dataclass(frozen=True, slots=True)
class Late:
    """What a process has done late."""

    is_first: bool
    """Whether nothing was there: so it is for a fragment of another attempt than was used, or of a
    batch whose messages were removed."""
    batch: int | None
    """Batch of the fragment that it was about, if it was about one."""


def done_late(folder: Path, role: str) -> list[Late]:
    """Return what came of what the processes of a role have done late."""
    return [Late(*json.loads(path.read_text())) for path in folder.glob(f"late-{role}-*")]


@dataclass(frozen=True, slots=True)
class Stop:
    """A process's place to stop."""

    folder: Path
    name: str

    async def before(self, work: Callable[[], Awaitable[Any]], message: Any = None) -> Any:
        """Do what lasts; if that is asked, stop before it and write down what came of it."""
        asked = self.folder / f"stop-{self.name}"
        try:
            asked.unlink()
        except FileNotFoundError:
            return await work()
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            found = await work()
        except CommitConflict:
            self._write(False, None)
            raise
        fragment = getattr(message, "fragment", None)
        self._write(found is not False, None if fragment is None else fragment.batch)
        return found

    def _write(self, is_first: bool, batch: int | None) -> None:
        late = self.folder / f"late-{self.name}-{time.monotonic_ns()}"
        late.write_text(json.dumps([is_first, batch]))


@contextmanager
def able_to_stop(folder: Path, name: str) -> Iterator[None]:
    """Run a process that stops when it is asked."""
    stop, publish = Stop(folder, name), Bus.publish
    wanted = PUBLISHES.get(name.split("-")[0], ())

    async def published(bus: Bus, message: Any) -> bool:
        if isinstance(message, wanted):
            return bool(await stop.before(lambda: publish(bus, message), message))
        return await publish(bus, message)

    async def committed(*given: Any) -> None:
        await stop.before(lambda: commit(*given))

    async def stored(*given: Any, **named: Any) -> bool:
        return bool(await stop.before(lambda: store_conditions(*given, **named)))

    with (
        patch.object(Bus, "publish", published),
        patch.object(services.trainer.versions, "commit", committed),
        patch.object(services.rollout.encoder, "store_conditions", stored),
    ):
        yield
