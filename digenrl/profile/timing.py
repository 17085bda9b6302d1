"""Seconds and memory of work that the device has done: on CUDA both ends are synchronised."""

import statistics
import time
from collections.abc import Callable

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
    found: list[float] = []
    while len(found) < repeats and (not found or spent < MAX_SECONDS):
        found.append(timed(device, work))
        spent += found[-1]
    return statistics.median(found)


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
    """Begins anew, without the memory that the allocator keeps from other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(network: nn.Module, device: torch.device) -> int:
    """Returns the most that was given out since `forget_peak`; on a CPU, the parameters' bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return sum(parameter.nbytes for parameter in network.parameters())
