"""Copies of an engine's weights and states in host memory that is kept, and their digests.

device held    copy to kept buffers, which are laid out as the objects that are stored
afterwards     digest of the copied weights; the objects are named, sent and written
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.devices.protocols import SamplingWeights, Snapshot
from shared.diffusion.shards import HostBuffers, HostPart
from shared.diffusion.weights import State, weights_digest


class SnapshotBuffers:
    """Host memory of everything that a version is stored as."""

    def __init__(self, shard_bytes: int) -> None:
        self.weights = HostBuffers(shard_bytes)
        self.states = HostBuffers(shard_bytes)
        self.sampling = HostBuffers(shard_bytes)


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Tells which weights a device held at a time."""

    trained: State
    sampling: State


@dataclass(frozen=True, slots=True)
class EngineCopy:
    """What an engine held, on the host."""

    weights: Sequence[HostPart]
    checkpoint: Sequence[HostPart]
    sampling: Sequence[HostPart] | None
    digest: str | None = None
    """Digest of the weights, if it was taken on the device; None if it is to be taken of the
    copy."""
    sampling_digest: str | None = None

    def snapshot(self) -> Snapshot:
        """Take the digests of the copy; touches no device."""
        sampling = None
        if self.sampling is not None:
            digest = self.sampling_digest or digest_of_parts(self.sampling)
            sampling = SamplingWeights(digest, self.sampling)
        return Snapshot(
            digest=self.digest or digest_of_parts(self.weights),
            weights=self.weights,
            checkpoint=self.checkpoint,
            sampling=sampling,
        )


def digest_of_parts(parts: Sequence[HostPart]) -> str:
    """Return the digest of whole weights, in the types that they are stored in."""
    return weights_digest({name: each for part in parts for name, each in part.tensors.items()})


BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of so many bytes."""


def same_bits(mine: Tensor, theirs: Tensor) -> bool:
    """Return whether two tensors, perhaps on two devices, are equal to the last bit."""
    bits = BITS[mine.dtype.itemsize]
    return torch.equal(mine.detach().view(bits), theirs.detach().to(mine.device).view(bits))
