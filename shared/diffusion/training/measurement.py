"""Measures time and memory of training passes, for the tuner of chunk sizes."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shared.devices.chunks import Chunk, Measurement
from shared.diffusion.loading.ranks import local_shard


def measured(
    train: Callable[[], None], chunk: Chunk, network: nn.Module, device: torch.device
) -> Measurement:
    """Trains a group in chunks of this size, and measures time and memory.

    On CUDA, memory is the peak of the allocator, including the weights. On a CPU, the peak of a
    process is less precise. Memory is then the bytes that the first forward pass saves for its
    backward pass: the part that grows with the number of rows.
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
    """Counts the bytes that autograd saves between the first forward pass and its backward pass.

    Views of the same storage count once, and weights do not count.
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
        """Counts a tensor of any shape, and returns the tensor without its graph."""
        storage = tensor.untyped_storage()
        if self._counting and storage.data_ptr() not in self._resident:
            self._kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # saving an output itself would keep its graph alive

    def unpack(self, tensor: Tensor) -> Tensor:
        """Stops counting, because the backward pass has begun."""
        self._counting = False
        return tensor
