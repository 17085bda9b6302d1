"""Measures time and memory of training passes, for the tuner of their sizes."""

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

    On CUDA, memory is the allocator's peak, weights included. A process on a CPU does not know its
    peak as well: there, memory is what the first forward pass keeps for its backward pass, which is
    the part that grows with rows, without the weights.
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
    """Counts the bytes that autograd keeps between the first forward pass and its backward pass.

    A storage counts once, however many views of it are kept; the network's own do not count.
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
        """Counts a tensor of any shape, and returns it without its graph."""
        storage = tensor.untyped_storage()
        if self._counting and storage.data_ptr() not in self._resident:
            self._kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # kept itself, an output would keep its graph alive

    def unpack(self, tensor: Tensor) -> Tensor:
        """Ends the count: the backward pass has begun."""
        self._counting = False
        return tensor
