"""The use of a worker's GPUs is read from NVIDIA's library, of which a stand-in has two GPUs."""

from types import SimpleNamespace
from typing import Any

import pytest

from shared.messages.workers import GpuUse
from shared.process.gpu_use import nvml, read_gpu_use


class Nvml:
    """Answers as the library does: bytes, percent and milliwatts of a handle."""

    class NVMLError(Exception): ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return {"GPU-1": 1}[name]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=(handle + 1) * 1000)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle == 7:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=40 + 20 * handle)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 100_000 * (handle + 1)


@pytest.mark.parametrize(
    ("gpus", "use"),
    [
        ("0", GpuUse(memory_bytes=1000, utilisation=0.4, watts=100.0)),
        ("GPU-1", GpuUse(memory_bytes=2000, utilisation=0.6, watts=200.0)),
        ("0,1", GpuUse(memory_bytes=3000, utilisation=0.5, watts=300.0)),
        ("7", None),
        ("", None),
    ],
)
def test_gpus_are_summed_up_and_a_slice_has_no_figures(gpus: str, use: GpuUse | None) -> None:
    assert read_gpu_use(Nvml(), gpus) == use


def test_without_the_library_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    nvml.cache_clear()
    assert read_gpu_use(nvml(), "0") is None
    nvml.cache_clear()
