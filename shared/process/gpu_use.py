"""Reads memory, utilisation and power of a worker's GPUs from NVIDIA's library, `nvidia-ml-py`."""

from functools import cache
from importlib import import_module
from typing import Any

from shared.messages.workers import GpuUse


@cache
def nvml() -> Any:
    """Return the library, ready for use; None where it, a driver or a GPU is missing."""
    try:
        library = import_module("pynvml")
        library.nvmlInit()
    except Exception:  # the library raises errors of its own
        return None
    return library


def read_gpu_use(library: Any, gpus: str) -> GpuUse | None:
    """Return the sum of memory and power and the mean utilisation of GPUs; None if unknown.

    Args:
        gpus: numbers or ids of the GPUs, as CUDA_VISIBLE_DEVICES counts them ("4,5").
    """
    if library is None or not gpus:
        return None
    num_bytes, percent, milliwatts = 0, 0.0, 0
    names = gpus.split(",")
    try:
        for name in names:
            by = "Index" if name.isdigit() else "UUID"
            handle = getattr(library, f"nvmlDeviceGetHandleBy{by}")(
                int(name) if name.isdigit() else name
            )
            num_bytes += library.nvmlDeviceGetMemoryInfo(handle).used
            percent += library.nvmlDeviceGetUtilizationRates(handle).gpu
            milliwatts += library.nvmlDeviceGetPowerUsage(handle)
    except library.NVMLError:  # such as of a slice
        return None
    utilisation = percent / 100 / len(names)
    return GpuUse(memory_bytes=num_bytes, utilisation=utilisation, watts=milliwatts / 1000)
