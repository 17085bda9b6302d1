"""Host memory that is kept for copies of an engine's weights and states."""

from collections.abc import Mapping

import torch
from torch import Tensor

from shared.devices.protocols import SamplingWeights, Snapshot
from shared.diffusion.weights.shards import HostBuffers

Types = Mapping[str, torch.dtype]
NamedTensors = tuple[Mapping[str, Tensor], str]
"""Weights, and their digest."""


class SnapshotBuffers:
    """Host memory of everything that a version is stored as, laid out as the objects that are
    stored."""

    def __init__(self, shard_bytes: int) -> None:
        self._weights = HostBuffers(shard_bytes)
        self._states = HostBuffers(shard_bytes)
        self._sampling = HostBuffers(shard_bytes)

    def take(
        self, trained: NamedTensors, sampling: NamedTensors | None,
        states: Mapping[str, Tensor], types: Types, *, is_first: bool = True,
    ) -> Snapshot:  # fmt: skip
        """Copy a version over the one before. ``types``: those in which weights are stored;
        ``is_first``: whether this rank copies tensors that every rank holds whole."""
        other = None
        if sampling is not None:
            kept = self._sampling.copy(sampling[0], types, is_first=is_first)
            other = SamplingWeights(sampling[1], kept)
        return Snapshot(
            digest=trained[1],
            weights=self._weights.copy(trained[0], types, is_first=is_first),
            checkpoint=self._states.copy(states, {}, is_first=is_first),
            sampling=other,
        )
