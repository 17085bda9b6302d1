"""Memory of the host in which tensors wait until their device needs them.

On a GPU this memory is pinned, and copies run on a stream of their own, alongside the computation.
On a CPU a tensor stays where it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MIN_PIECE_BYTES = 2**20


class HostMemory:
    """Stores tensors of a CPU."""

    def store(self, tensor: Tensor) -> Any:
        """Returns what `fetch` takes."""
        return tensor

    def fetch(self, stored: Any) -> Tensor:
        """Returns a tensor of the device. It has its values once the device has passed `arrive`."""
        tensor: Tensor = stored
        return tensor

    def arrive(self) -> None:
        """Has the device wait for everything that was fetched so far."""


@dataclass(frozen=True, slots=True)
class _Pieces:
    pieces: tuple[Tensor, ...]
    """Bytes of the tensor, in order."""
    shape: torch.Size
    dtype: torch.dtype


class PinnedMemory(HostMemory):
    """Stores tensors of a GPU, or tensors that the GPU is to fetch.

    The memory of a fetched tensor belongs to the device's own stream. Copies therefore wait for the
    earlier work of that stream, and a caller that releases an unused tensor calls `arrive` first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def store(self, tensor: Tensor) -> _Pieces:
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        sizes = piece_sizes(len(flat))
        pieces = tuple(torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes)
        with self._copying():
            for piece, part in zip(pieces, flat.split(sizes), strict=True):
                piece.copy_(part, non_blocking=True)
        if flat.is_cuda:
            flat.record_stream(self._stream)
        return _Pieces(pieces, tensor.shape, tensor.dtype)

    def fetch(self, stored: _Pieces) -> Tensor:
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device=self._device)
        parts = tensor.view(-1).view(torch.uint8).split([len(each) for each in stored.pieces])
        with self._copying():
            for piece, part in zip(stored.pieces, parts, strict=True):
                part.copy_(piece, non_blocking=True)
        return tensor

    def arrive(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield


def host_memory(device: torch.device) -> HostMemory:
    """Returns memory of the host for tensors of a device."""
    return PinnedMemory(device) if device.type == "cuda" else HostMemory()


def piece_sizes(size: int) -> list[int]:
    """Returns powers of two, and a rest, that add up to a size: torch rounds each piece of pinned
    memory up to a power of two.

    >>> [size // MIN_PIECE_BYTES for size in piece_sizes(72 * MIN_PIECE_BYTES)]
    [64, 8]
    >>> piece_sizes(0)
    []
    """
    sizes = []
    while size > MIN_PIECE_BYTES:
        sizes.append(1 << (size.bit_length() - 1))
        size -= sizes[-1]
    return [*sizes, size] if size else sizes
