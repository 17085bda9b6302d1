"""Tensors as they are read from the store, made in a test."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from shared.devices.protocols import Snapshot
from shared.diffusion.sampling.tensors import pack
from shared.diffusion.weights.trained_weights import StagedTensors, Staging
from shared.messages.contracts import ObjectRef
from shared.run.manifest import FetchedObject, VersionTensors, WantsTensor
from tests import examples


@dataclass(frozen=True)
class Given:
    """Objects that are there already."""

    given: Sequence[FetchedObject]
    ref: ObjectRef = field(default_factory=lambda: examples.ref("given"))
    weights_digest: str | None = None

    async def parts(self, wanted: WantsTensor | None = None) -> AsyncIterator[FetchedObject]:
        for part in self.given:
            yield part


def one_object(data: bytes) -> Given:
    return Given([FetchedObject(data, None)])


def packed(parts: Sequence[VersionTensors]) -> bytes:
    """The only object of small weights, or of a small checkpoint."""
    [part] = parts
    return bytes(part.pack())


def read_back(parts: Sequence[VersionTensors]) -> Given:
    return Given([FetchedObject(bytes(part.pack()), part.pieces) for part in parts])


def as_bytes(snapshot: Snapshot) -> tuple[str, list[bytes], list[bytes]]:
    """A snapshot as it is compared with another."""
    stored = (snapshot.weights, snapshot.checkpoint)
    weights, checkpoint = ([bytes(part.pack()) for part in parts] for parts in stored)
    return snapshot.digest, weights, checkpoint


def staged(network: nn.Module, tensors: Mapping[str, Tensor]) -> StagedTensors:
    """These weights, ready to be put in use."""
    staging = Staging(network)
    staging.add(FetchedObject(pack(dict(tensors)), None))
    return staging.finish()
