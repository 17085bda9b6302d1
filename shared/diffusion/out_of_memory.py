"""Turns a device's lack of memory into a typed failure that has its sizes and the remedy."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shared.errors import OutOfMemory

SIGNS = ("out of memory", "not enough memory", "can't allocate memory")
"""What allocators write into a RuntimeError that has no type of its own."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
MAX_REASON = 300
"""Characters quoted of the allocator's message."""


@contextmanager
def fits(device: torch.device, what: str, remedy: str) -> Iterator[None]:
    """Surrounds work on a device.

    Raises:
        OutOfMemory: if the work does not fit. The memory that its frames held is released by then.
    """
    reason = None
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:MAX_REASON]
    if reason is not None:
        has = f"{device} has {_gib(device_bytes(device))}" if device.type == "cuda" else str(device)
        release(device)
        raise OutOfMemory(f"out of memory: {what} ({has}: {reason}); {remedy}")


def is_out_of_memory(error: BaseException) -> bool:
    """Says whether an error is for lack of memory, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in said for sign in SIGNS)


def release(device: torch.device) -> None:
    """Frees memory that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_bytes(device: torch.device) -> int:
    """Returns the memory of the device; for the CPU, that of the host or the container."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(host, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return host


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
