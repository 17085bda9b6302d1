"""Emulated devices that hang when a test asks for it: their process lives, and reports."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.cluster.hold import Held
from bench.runner.figures import Use
from services.reward.app import RewardApp
from shared.process.watchdog import Watchdog
from shared.process.worker import Worker

HARD_S = 3.0
"""Hard deadline of a piece of work."""


def ask_to_hang(folder: Path, name: str) -> None:
    """Have the device of a process hang at its next work."""
    (folder / f"hang-{name}").touch()


@contextmanager
def able_to_hang(folder: Path, name: str) -> Iterator[None]:
    """Run a process whose devices may hang, under a watchdog as any worker has it."""
    asked = folder / f"hang-{name}"
    hold, parts, made = Held.hold, RewardApp._outcomes, Worker.__post_init__

    async def held(device: Held, seconds: float, use: Use, **more: Any) -> float:
        if _taken(asked):
            await asyncio.Event().wait()
        return await hold(device, seconds, use, **more)

    def scored(app: RewardApp, *given: Any) -> Any:
        if _taken(asked):
            time.sleep(3600)
        return parts(app, *given)

    def watched(worker: Worker) -> None:
        made(worker)
        worker.progress.hard_s = HARD_S
        Watchdog(worker.progress, look_s=0.2).start()

    with (
        patch.object(Held, "hold", held),
        patch.object(RewardApp, "_outcomes", scored),
        patch.object(RewardApp, "_patience", lambda app, message: HARD_S / 2),
        patch.object(Worker, "__post_init__", watched),
    ):
        yield


def _taken(asked: Path) -> bool:
    try:
        asked.unlink()
    except FileNotFoundError:
        return False
    return True
