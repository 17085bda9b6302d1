"""All figures of growth, one after the other."""

import asyncio
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.growth import fluid_core, history, live
from services.scheduler.shell.garbage_collection import settle_heap

Row = dict[str, Any]
FEW_MEMBERS = 64
"""Fluid devices with which the scheduler looks at all of them at every event."""


def measure_all(
    folder: Path,
    devices: Sequence[int],
    steps: Sequence[int],
    groups: int,
    num_live: int,
    batches: int,
) -> Iterator[Row]:
    """Yield each figure as soon as it is known.

    Args:
        groups: of a commit record.
        num_live: workers of the real scheduler, which opens so many ``batches``; 0: none.
    """
    settle_heap()  # as the scheduler does: otherwise collections of garbage grow with all there is
    for number in (FEW_MEMBERS, *devices):
        yield {"members": asdict(fluid_core.measure(number))}
        ahead = fluid_core.measure(number, max_staleness=1)
        yield {"members, one step ahead": asdict(ahead)}
    folder.mkdir(parents=True, exist_ok=True)
    for number in steps:
        yield {"history": asdict(_apart(_history, folder, number, groups))}
    if len(steps) > 1:
        yield {"resident bytes while running": _apart(_grown, folder, max(steps), groups, steps)}
    if num_live:
        with tempfile.TemporaryDirectory(dir=folder) as work:
            costs = asyncio.run(live.measure(Path(work), num_live, batches))
            yield {"live": asdict(costs)}


def _apart(call: Callable[..., Any], *given: Any) -> Any:
    """Call in a new process, whose memory is its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *given).result()


def _history(folder: Path, steps: int, groups: int) -> history.HistoryCosts:
    with tempfile.TemporaryDirectory(dir=folder) as work:
        return asyncio.run(history.measure(Path(work), steps, groups))


def _grown(folder: Path, steps: int, groups: int, looks: Sequence[int]) -> dict[int, int]:
    with tempfile.TemporaryDirectory(dir=folder) as work:
        return asyncio.run(history.grow(Path(work), steps, groups, tuple(looks)))
