"""Content of the shards of a version whose weights or checkpoint are several objects.

A manifest is one JSON object, named by its content like every other: the commit record names it,
and it names the shards, each with its digest, its size and the pieces of tensors that it holds.
Together the pieces are every tensor exactly once, so that any number of ranks may write them and
any other number read them. One small object without a manifest is a version as well: then the
record names that object.
"""

import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Annotated, Literal, Protocol, Self

from pydantic import Field, ValidationError, model_validator

from shared import limits
from shared.errors import ContractError
from shared.messages.contracts import ObjectRef
from shared.messages.records import Count, Digest, Record
from shared.store.tensor_header import BITS, Data

SHARD = ".safetensors"
MANIFEST = ".manifest.json"
CHANGE = ".change.safetensors"

Extent = Annotated[tuple[Count, ...], Field(max_length=limits.MAX_DIMENSIONS)]
DType = Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"]


class TensorBox(Record):
    """A box of a tensor."""

    dtype: DType
    whole: Extent
    """Shape of the tensor."""
    offset: Extent
    """Index of the box's first element."""
    shape: Extent
    """Shape of the box."""

    @model_validator(mode="after")
    def _lies_within(self) -> Self:
        boxes = zip(self.offset, self.shape, self.whole, strict=True)
        if any(first + size > whole for first, size, whole in boxes):  # ValueError if not as long
            raise ValueError(f"a piece {self.shape} at {self.offset} of a tensor {self.whole}")
        return self

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * BITS[self.dtype] // 8

    def overlaps(self, other: "TensorBox") -> bool:
        """Return whether both, of one tensor, have an element in common."""
        return all(
            a < b + n and b < a + m
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )


TensorBoxes = Mapping[str, TensorBox]


class Shard(Record):
    """An object, and the pieces that it holds, by the names of their tensors.

    Equal bytes may be several shards: two ranks' shares of a tensor of zeros are one object.
    """

    object: ObjectRef
    pieces: dict[Annotated[str, Field(max_length=limits.MAX_TENSOR_NAME)], TensorBox] = Field(
        max_length=limits.MAX_TENSORS
    )

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if sum(piece.num_bytes for piece in self.pieces.values()) > self.object.size:
            raise ValueError(f"{self.object.key} is smaller than what it holds")
        return self


class Manifest(Record):
    format: Literal[1] = 1
    weights_digest: Digest
    """Digest of the version's weights, as in `Policy`: a checkpoint names its weights."""
    shards: Annotated[tuple[Shard, ...], Field(min_length=1, max_length=limits.MAX_SHARDS)]

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        check_complete(shard.pieces for shard in self.shards)
        return self

    def encode(self) -> bytes:
        return self.model_dump_json().encode()


class StoredParts(Record):
    """One process's stored part of a version."""

    weights: tuple[Shard, ...]
    checkpoint: tuple[Shard, ...]


def check_complete(shards: Iterable[TensorBoxes]) -> None:
    """Raise ValueError unless the pieces are each element of each tensor exactly once."""
    boxes: dict[str, list[TensorBox]] = {}
    for pieces in shards:
        for name, piece in pieces.items():
            boxes.setdefault(name, []).append(piece)
    for name, of_one in boxes.items():
        _check_tensor(name, of_one)


def _check_tensor(name: str, pieces: Sequence[TensorBox]) -> None:
    if len({(piece.dtype, piece.whole) for piece in pieces}) > 1:
        raise ValueError(f"{name[:80]} has several types or shapes")
    if len(pieces) > limits.MAX_TENSOR_PIECES:
        raise ValueError(
            f"{name[:80]} is in {len(pieces)} pieces; at most {limits.MAX_TENSOR_PIECES}"
        )
    if sum(piece.num_elements for piece in pieces) != math.prod(pieces[0].whole):
        raise ValueError(f"{name[:80]} is not whole")
    if any(one.overlaps(other) for one, other in _neighbours(pieces)):
        raise ValueError(f"{name[:80]} has pieces that overlap")


def _neighbours(pieces: Sequence[TensorBox]) -> Iterable[tuple[TensorBox, TensorBox]]:
    """Return the pairs that overlap if any do: where pieces differ along one dimension, as ranks'
    shares do, those that follow one another."""
    extents = (zip(piece.shape, piece.whole, strict=True) for piece in pieces)
    divided = {d for each in extents for d, (size, whole) in enumerate(each) if size != whole}
    if len(divided) > 1:
        return combinations(pieces, 2)
    return pairwise(sorted(pieces, key=lambda piece: piece.offset))


def is_manifest(ref: ObjectRef) -> bool:
    return ref.key.endswith(MANIFEST)


def is_change(ref: ObjectRef) -> bool:
    """Whether an object is the change of weights since others."""
    return ref.key.endswith(CHANGE)


def read_manifest(data: bytes, key: str) -> Manifest:
    """Read the manifest that is stored as ``key``.

    Raises:
        ContractError: if it is invalid, or names objects outside of its folder.
    """
    if len(data) > limits.MAX_MANIFEST_BYTES:
        raise ContractError(f"{key} is too large for a manifest: {len(data)} bytes")
    try:
        manifest = Manifest.model_validate_json(data)
    except (ValidationError, RecursionError) as error:
        raise ContractError(f"{key} is not a manifest: {str(error)[:200]}") from error
    folder = key.rsplit("/", 1)[0]
    for shard in manifest.shards:
        ref = shard.object
        if ref.key != f"{folder}/{ref.sha256}{SHARD}":
            raise ContractError(f"{key} names {ref.key[:80]!r}, which is no shard in its folder")
    return manifest


class VersionTensors(Protocol):
    """Some tensors of a version, copied to this host: stored as one object."""

    @property
    def pieces(self) -> TensorBoxes: ...

    def pack(self) -> bytes | memoryview:
        """Return the object's bytes; called in a thread."""


@dataclass(frozen=True, slots=True)
class FetchedObject:
    """One object of a version's weights, or of its checkpoint."""

    data: Data
    pieces: TensorBoxes | None
    """Required content; None if its own header defines it: whole tensors."""


WantsTensor = Callable[[str, TensorBox], bool]
"""Whether a reader needs this piece of the tensor of this name."""


class StoredTensors(Protocol):
    """Tensors in the store, in one object or in shards."""

    @property
    def ref(self) -> ObjectRef:
        """The object in the commit record."""

    @property
    def weights_digest(self) -> str | None:
        """Digest of the weights, from the commit record that names these objects: it then need not
        be computed again. None if it is not known."""

    def parts(self, wanted: WantsTensor | None = None) -> AsyncIterator[FetchedObject]:
        """Fetch one object after the other, without those that hold nothing that is wanted.

        Raises:
            IntegrityError: if an object is missing or differs from its reference.
        """


def cut(
    sizes: Mapping[str, int], most: int, max_tensors: int = limits.MAX_TENSORS
) -> Iterable[Collection[str]]:
    """Cut named tensors of these sizes, in order, into shards of at most ``most`` bytes and a
    maximum number of tensors; a larger tensor has a shard of its own.

    >>> list(cut({"a": 3, "b": 3, "c": 9, "d": 1}, 6))
    [['a', 'b'], ['c'], ['d']]
    """
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and (total + size > most or len(names) == max_tensors):
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names
