"""Seconds and memory by the size of a call: climbing to larger ones, and the cost model behind it.

On CUDA both ends of what is timed are synchronised.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn

MAX_SECONDS = 20.0
"""Limit for one median: long calls are repeated less often."""


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Returns the seconds that ``work`` takes."""
    watch = Stopwatch(device)
    work()
    return watch.lap()


def median_seconds(device: torch.device, work: Callable[[], object], repeats: int) -> float:
    """Times ``work``, which is done once before it counts, and ``repeats + 1`` times at most."""
    spent = timed(device, work)
    times: list[float] = []
    while len(times) < repeats and (not times or spent < MAX_SECONDS):
        times.append(timed(device, work))
        spent += times[-1]
    return statistics.median(times)


class Stopwatch:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = self._now()

    def lap(self) -> float:
        """Returns the seconds since the last call, or since the beginning."""
        began, self._began = self._began, self._now()
        return self._began - began

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def forget_peak(device: torch.device) -> None:
    """Restart without the memory that the allocator keeps from other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(network: nn.Module, device: torch.device) -> int:
    """Returns the most that was given out since `forget_peak`; on a CPU, the parameters' bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return sum(parameter.nbytes for parameter in network.parameters())


T = TypeVar("T")

TIE_FACTOR = 1.05
"""Within this factor of the fastest, the smaller call is what a device needs memory for."""


@dataclass(frozen=True, slots=True)
class Rung:
    rows: int
    """Samples of a denoising step, or rows of a training pass."""
    seconds: float
    """Seconds of the whole call."""
    peak_bytes: int

    @property
    def per_row(self) -> float:
        return self.seconds / self.rows


@dataclass(frozen=True, slots=True)
class Ladder:
    """Calls of growing size; empty if not even the smallest fits."""

    rungs: tuple[Rung, ...]
    out_of_memory: int | None = None
    """Rows of the call that did not fit."""

    @property
    def best(self) -> Rung:
        """Returns the fastest per row."""
        return min(self.rungs, key=lambda rung: rung.per_row)

    @property
    def frugal(self) -> Rung:
        """Returns the smallest that is about as fast per row as the fastest."""
        limit = self.best.per_row * TIE_FACTOR
        return next(rung for rung in self.rungs if rung.per_row <= limit)


def climb(sizes: Iterable[int], measure: Callable[[int], Rung]) -> Ladder:
    """Measures growing calls until one does not fit the device."""
    rungs: list[Rung] = []
    for rows in sizes:
        rung = fitting(partial(measure, rows))
        if rung is None:
            return Ladder(tuple(rungs), out_of_memory=rows)
        rungs.append(rung)
    return Ladder(tuple(rungs))


def fitting(measure: Callable[[], T]) -> T | None:
    """Returns what is measured, or None if it does not fit the device."""
    try:
        return measure()
    except torch.OutOfMemoryError:
        pass  # the traceback holds what was allocated: given back after this block
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def powers_of_two(most: int) -> list[int]:
    """Yields 1, 2, 4, ... up to ``most``."""
    return [2**power for power in range(most.bit_length()) if 2**power <= most]
