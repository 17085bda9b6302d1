"""Cuts tensors into the parts of a version, on every rank its own, and puts parts together again.

A sharded tensor's part is what this rank holds of it; no rank gathers any. A reader's parts of the
tensors may differ from the writer's: it copies its own elements from every piece.
"""

import asyncio
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shared.diffusion.sampling.tensors import unpack
from shared.diffusion.weights.mapped import DTYPES, unpack_mapped
from shared.errors import ContractError, IntegrityError
from shared.run.manifest import DType, FetchedObject, StoredTensors, TensorBox, TensorBoxes, cut

_NAMES: dict[torch.dtype, DType] = {dtype: name for name, dtype in DTYPES.items()}
_ORDER: tuple[DType, ...] = (
    "I64", "F64", "F32", "I32", "BF16", "F16", "I16", "I8", "U8", "BOOL",
)  # fmt: skip
"""Types in the order in which safetensors lays tensors out."""


def local_part(tensor: Tensor) -> tuple[Tensor, TensorBox]:
    """Returns what this rank holds of a tensor, and which box of it that is: all of it, unless it
    is sharded."""
    dtype = _NAMES[tensor.dtype]
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return tensor, TensorBox(dtype=dtype, whole=shape, offset=(0,) * len(shape), shape=shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    piece = TensorBox(dtype=dtype, whole=tuple(tensor.shape), offset=offset, shape=tuple(shape))
    return tensor.to_local(), piece


@dataclass(frozen=True, slots=True)
class HostPart:
    """Implements `shared.run.manifest.VersionTensors`: tensors of one shard, in host memory, which
    lie there as in the object that they are stored as."""

    pieces: TensorBoxes
    tensors: dict[str, Tensor]
    """Views of ``stored``."""
    stored: Tensor
    """(bytes,) uint8: the safetensors object."""

    def pack(self) -> memoryview:
        return self.stored.numpy().data


class HostBuffers:
    """Host memory for what this rank stores of a version, pinned if the tensors are on a GPU. It is
    kept from one version to the next: memory that is new takes longer than the copy."""

    def __init__(self, shard_bytes: int) -> None:
        self._shard_bytes = shard_bytes
        self._layout: object = None
        """Names, shapes and types that the parts were made for."""
        self._parts: list[HostPart] = []

    @torch.no_grad()
    def copy(
        self,
        tensors: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype],
        *,
        is_first: bool = True,
    ) -> list[HostPart]:
        """Copies what this rank has to store of ``tensors``: its part of sharded ones; what lies
        whole on every rank only if it ``is_first``. The next call overwrites it.

        ``dtypes``: types to store tensors in, where these are not their own.
        """
        named = {name: tensors[name].detach() for name in sorted(tensors)}
        layout = (
            is_first,
            tuple((n, each.shape, each.dtype, dtypes.get(n)) for n, each in named.items()),
        )
        if layout != self._layout:
            self._layout, self._parts = None, []  # before there is a second set
            groups = _stored_together(named, dtypes, is_first, self._shard_bytes)
            self._parts = [_room(each) for each in groups]
            self._layout = layout
        gpus = set()
        for part in self._parts:
            for name, room in part.tensors.items():
                local = _local(named[name])
                room.copy_(local.to(room.dtype), non_blocking=True)
                if local.is_cuda:
                    gpus.add(local.device)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        return list(self._parts)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


OwnTensors = Mapping[str, tuple[Tensor, TensorBox]]
"""This rank's parts of tensors, by name, and their stored boxes."""


def _stored_together(
    named: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], is_first: bool, shard_bytes: int
) -> Iterator[OwnTensors]:
    """Yields what is stored as one object."""
    sharded = {name: each for name, each in named.items() if isinstance(each, DTensor)}
    whole = {name: each for name, each in named.items() if name not in sharded} if is_first else {}
    # Not in one object: every rank reads what is whole, and only its own part of the rest.
    for group in (whole, sharded):
        mine = {name: _as_stored(each, dtypes.get(name)) for name, each in group.items()}
        sizes = {
            name: piece.num_bytes
            for name, (_, piece) in mine.items()
            if piece.num_elements or (is_first and 0 in piece.whole)
        }
        for names in cut(sizes, shard_bytes):
            yield {name: mine[name] for name in names}


def _as_stored(tensor: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, TensorBox]:
    local, piece = local_part(tensor)
    if dtype is not None:
        piece = piece.model_copy(update={"dtype": _NAMES[dtype]})
    return local, piece


def _room(mine: OwnTensors) -> HostPart:
    """Makes room for the tensors of an object, and writes its header."""
    pieces = {name: piece for name, (_, piece) in mine.items()}
    header, starts, size = object_layout(pieces)
    is_on_gpu = any(tensor.is_cuda for tensor, _ in mine.values())
    stored = torch.empty(size, dtype=torch.uint8, pin_memory=is_on_gpu)
    stored[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    views = {
        name: stored[starts[name] : starts[name] + piece.num_bytes]
        .view(DTYPES[piece.dtype])
        .view(piece.shape)
        for name, piece in pieces.items()
    }
    return HostPart(pieces, views, stored)


def object_layout(pieces: TensorBoxes) -> tuple[bytes, dict[str, int], int]:
    """Returns the header of the safetensors object that holds these pieces, where each begins, and
    the object's bytes, as safetensors itself writes them: by type, the widest first, so that each
    is aligned; then by name."""
    ordered = sorted(pieces, key=lambda name: (_ORDER.index(pieces[name].dtype), name))
    entries, offset, starts = {}, 0, {}
    for name in ordered:
        piece, starts[name] = pieces[name], offset
        offset += piece.num_bytes
        entries[name] = {
            "dtype": piece.dtype, "shape": piece.shape, "data_offsets": (starts[name], offset),
        }  # fmt: skip
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    begin = len(header)
    return header, {name: begin + start for name, start in starts.items()}, begin + offset


def read_part(part: FetchedObject) -> Iterator[tuple[str, Tensor, TensorBox]]:
    """Reads the tensors of an object, and which boxes of the whole ones they are.

    Raises:
        ContractError: if it is no safetensors object, or holds other tensors than it must.
    """
    data = part.data
    tensors = unpack_mapped(data) if isinstance(data, mmap) else unpack(data)
    pieces = (
        {n: local_part(t)[1] for n, t in tensors.items()} if part.pieces is None else part.pieces
    )
    wanted = {(name, each.shape, DTYPES[each.dtype]) for name, each in pieces.items()}
    given = {(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if wanted != given:
        name, shape, dtype = min(wanted ^ given, key=str)
        raise ContractError(
            f"a shard does not match its manifest: {name[:80]} {list(shape)} {dtype}"
        )
    for name, tensor in tensors.items():
        yield name, tensor, pieces[name]


@torch.no_grad()
def place(target: Tensor, tensor: Tensor, piece: TensorBox) -> int:
    """Copies the elements of a piece that are this rank's into ``target``, which has the shape of
    the whole tensor; returns their number."""
    local, mine = local_part(target)
    boxes = list(zip(mine.offset, mine.shape, piece.offset, piece.shape, strict=True))
    both = [(max(a, b), min(a + n, b + m)) for a, n, b, m in boxes]
    if any(first >= last for first, last in both):
        return 0
    to = tuple(slice(i - a, j - a) for (i, j), (a, *_) in zip(both, boxes, strict=True))
    source = tuple(slice(i - b, j - b) for (i, j), (_, _, b, _) in zip(both, boxes, strict=True))
    local[to].copy_(tensor[source])
    return math.prod(last - first for first, last in both)


class TensorAssembly:
    """Puts the pieces of tensors where they belong, and knows what is missing."""

    def __init__(self) -> None:
        self._targets: dict[str, Tensor] = {}
        self._mine: dict[str, TensorBox] = {}
        self._missing: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._targets

    def expect(self, name: str, target: Tensor) -> None:
        """Take pieces of ``name``, and put them into ``target``, until it is complete."""
        self._targets[name] = target
        self._mine[name] = local_part(target)[1]
        self._missing[name] = self._mine[name].num_elements

    def wants(self, name: str, piece: TensorBox) -> bool:
        """Returns whether this rank has elements of this piece."""
        mine = self._mine.get(name)
        return mine is not None and mine.whole == piece.whole and mine.overlaps(piece)

    def add(self, name: str, tensor: Tensor, piece: TensorBox) -> None:
        """Raises IntegrityError if it is no piece of the tensor of that name."""
        target = self._targets.get(name)
        if target is None or (piece.whole, tensor.dtype) != (tuple(target.shape), target.dtype):
            raise _foreign(name, piece.whole, tensor.dtype)
        self._missing[name] -= place(target, tensor, piece)

    def finish(self) -> None:
        """Raises IntegrityError if a tensor is not complete."""
        for name, number in self._missing.items():
            if number:
                target = self._targets[name]
                raise _foreign(name, target.shape, target.dtype)


def _foreign(name: str, shape: Sequence[int], dtype: torch.dtype) -> IntegrityError:
    return IntegrityError(
        f"these weights belong to another adapter or model: {name} {list(shape)} {dtype}"
    )


async def whole_tensors(stored: StoredTensors, prefix: str = "") -> dict[str, Tensor]:
    """Fetches the tensors whose names begin with ``prefix``, whole, into the host's memory.

    Raises:
        ContractError: if an object holds no tensors, or others than it must.
        IntegrityError: if an object is missing, or a tensor is not complete.
    """
    tensors: dict[str, Tensor] = {}
    assembly = TensorAssembly()

    def add(part: FetchedObject) -> None:
        for name, tensor, piece in read_part(part):
            if name.startswith(prefix):
                if name not in tensors:
                    tensors[name] = torch.empty(piece.whole, dtype=tensor.dtype)
                    assembly.expect(name, tensors[name])
                assembly.add(name, tensor, piece)

    async for part in stored.parts(lambda name, _: name.startswith(prefix)):
        await asyncio.to_thread(add, part)
    assembly.finish()
    return tensors
