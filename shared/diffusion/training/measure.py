"""Seconds and memory of training one group: what the tuner of chunks is told."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shared.diffusion.weights import local_shard
from shared.models.chunks import Chunk, Measurement

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def device_bytes(device: torch.device) -> int:
    """Memory of the device; of the CPU, what the host or the container has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(host, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return host


def measured(
    train: Callable[[], None], chunk: Chunk, network: nn.Module, device: torch.device
) -> Measurement:
    """Train a group in chunks of this size, and say what it took.

    On CUDA memory is what the allocator gave out at most, the weights included. A process on a CPU
    cannot tell its peak so closely: there it is the tensors that the first forward pass keeps for
    its backward, which is the part that grows with rows; the weights are left out.
    """
    if device.type == "cuda":
        return _measured_on_cuda(train, chunk, device)
    saved = SavedForBackward(network)
    began = time.monotonic()
    with saved_tensors_hooks(saved.pack, saved.unpack):
        train()
    seconds = time.monotonic() - began
    return Measurement(chunk=chunk, seconds=seconds, peak_bytes=saved.num_bytes)


def _measured_on_cuda(train: Callable[[], None], chunk: Chunk, device: torch.device) -> Measurement:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    resident = torch.cuda.memory_allocated(device)
    began = time.monotonic()
    train()
    torch.cuda.synchronize(device)
    return Measurement(
        chunk=chunk,
        seconds=time.monotonic() - began,
        peak_bytes=torch.cuda.max_memory_allocated(device),
        resident_bytes=resident,
    )


class SavedForBackward:
    """Counts what autograd keeps between the first forward pass and its backward pass.

    Storages count once, however many views of them are kept; the network's own do not count.
    """

    def __init__(self, network: nn.Module) -> None:
        tensors = map(local_shard, (*network.parameters(), *network.buffers()))
        self._resident = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._kept: dict[int, int] = {}
        self._counting = True

    @property
    def num_bytes(self) -> int:
        return sum(self._kept.values())

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if self._counting and storage.data_ptr() not in self._resident:
            self._kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # kept itself, an output would keep its graph alive

    def unpack(self, tensor: Tensor) -> Tensor:
        self._counting = False
        return tensor
