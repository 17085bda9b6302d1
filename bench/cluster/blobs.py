"""What emulated devices store: bytes of the right number, told apart by what they stand for.

An adapter begins with the digest of the weights that it stands for. A sample's bytes begin with a
key that follows from those weights, the prompt and the sample's seed, and from nothing else: not
from the device, the attempt or the fragment. Media are a safetensors file, as the reward service
reads it. The rest of every object is the same random bytes.
"""

import hashlib
import json
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from mmap import mmap
from typing import NamedTuple

from shared.errors import ContractError, FaultyConditions
from shared.learning.seeds import sample_seed
from shared.messages.contracts import GenerateFragment
from shared.run.manifest import StoredTensors, TensorBoxes
from shared.store.backend import Content

DIGEST_BYTES = 64
_MIB = 1 << 20
LARGE = 256 * _MIB
"""Bytes from which `Kept` keeps them."""
_TRAJECTORY = struct.Struct(">4Q32s")
"""Batch, group, sample, seed and key."""


class Origin(NamedTuple):
    """Where a sample comes from."""

    batch: int
    group: int
    sample: int
    seed: int


@dataclass(frozen=True, slots=True)
class Sample:
    origin: Origin
    key: bytes
    """32 bytes that are those of no other sample, prompt or weights."""


def samples_of(task: GenerateFragment, weights: str) -> list[Sample]:
    """Returns the samples of a fragment, made with the weights of that digest."""
    fragment = task.fragment
    found = []
    for sample in fragment.samples:
        seed = sample_seed(0, fragment.batch, fragment.group, sample)
        text = f"{weights}/{seed}/{task.prompt.text}"
        key = hashlib.sha256(text.encode()).digest()
        found.append(Sample(Origin(fragment.batch, fragment.group, sample, seed), key))
    return found


@lru_cache(maxsize=1)
def _noise() -> bytes:
    return random.Random(0).randbytes(_MIB)


def filled(head: bytes, size: int) -> bytes:
    """Returns ``head``, and random bytes up to ``size``."""
    return b"".join([head, *_filling(size - len(head))])


def _filling(size: int) -> list[bytes]:
    """Returns parts that are copied once only, by whoever joins them."""
    whole, rest = divmod(max(0, size), _MIB)
    return [*[_noise()] * whole, _noise()[:rest]]


def conditions_blob(prompt: str, size: int) -> bytes:
    """Returns the conditions of a prompt."""
    return filled(prompt.encode(), size)


def check_conditions(conditions: bytes, prompt: str) -> None:
    """Raises FaultyConditions unless these are the conditions of the prompt."""
    if conditions != conditions_blob(prompt, len(conditions)):
        raise FaultyConditions(f"these are not the conditions of {prompt!r}")


@dataclass(frozen=True, slots=True)
class Kept:
    """Holds large bytes between versions, as a trainer keeps the buffers that it copies a version
    to: memory that is new at each version is slow to be had, and no run takes it."""

    buffers: dict[tuple[str, int], mmap] = field(default_factory=dict)

    def filled(self, name: str, head: bytes, size: int) -> Content:
        """Returns what `filled` does; of large bytes a view, until the next call with this name,
        which comes a batch later. ``head`` stands at each MiB of those, so that no part of it is an
        object that the store has already: to replace one takes as long as to delete it."""
        if size < LARGE:
            return filled(head, size)
        buffer = self.buffers.get((name, size))
        if buffer is None:
            buffer = self.buffers[name, size] = mmap(-1, size)  # begins at a page, as a shard does
            for at in range(0, size, _MIB):
                buffer[at : at + _MIB] = _noise()[: size - at]
        for at in range(0, size, _MIB):
            stamped = head[: size - at]
            buffer[at : at + len(stamped)] = stamped
        return memoryview(buffer)


@dataclass(frozen=True, slots=True)
class BytesPart:
    """A part of a version that is nothing but bytes: it has no pieces of tensors."""

    data: Content
    pieces: TensorBoxes = field(default_factory=dict)

    def pack(self) -> Content:
        return self.data


def parts_of(data: Content, number: int) -> list[BytesPart]:
    """Cut ``data`` into ``number`` parts of one size; the last may be smaller."""
    size = -(-len(data) // number)
    return [BytesPart(data[at : at + size]) for at in range(0, len(data), size)]


async def joined(stored: StoredTensors) -> bytes:
    """Fetches what `parts_of` has cut."""
    return b"".join([part.data async for part in stored.parts()])


async def head_of(stored: StoredTensors) -> bytes:
    """Fetches what `parts_of` has cut, and returns only what an adapter begins with: its other
    bytes lie in the host's cache, and need not be copied."""
    heads = [bytes(part.data[:DIGEST_BYTES]) async for part in stored.parts()]
    return b"".join(heads)[:DIGEST_BYTES]


def adapter_blob(digest: str, size: int) -> bytes:
    """Returns an adapter that stands for the weights of ``digest``."""
    return filled(digest.encode(), size)


def digest_of(adapter: bytes) -> str:
    """Returns the digest of the weights that an adapter stands for.

    Raises:
        ContractError: if it is no adapter of an emulated device.
    """
    head = adapter[:DIGEST_BYTES]
    if len(head) != DIGEST_BYTES or set(head) - set(b"0123456789abcdef"):
        raise ContractError("this is no adapter of an emulated device")
    return head.decode()


def trajectory_blob(samples: Sequence[Sample], size: int, start: int = 0) -> bytes:
    """Returns ``size`` bytes for each sample, at least 64, and ``start`` for all of them."""
    heads = (_TRAJECTORY.pack(*sample.origin, sample.key) for sample in samples)
    each = (part for head in heads for part in (head, *_filling(size - _TRAJECTORY.size)))
    return b"".join([*each, *_filling(start)])


def read_origin(trajectory: bytes | memoryview) -> Origin:
    """Reads where a sample comes from, in its bytes.

    Raises:
        ContractError: if they are too few for an emulated trajectory.
    """
    if len(trajectory) < _TRAJECTORY.size:
        raise ContractError(f"{len(trajectory)} bytes are no emulated trajectory")
    *origin, _ = _TRAJECTORY.unpack_from(trajectory)
    return Origin(*origin)


def media_blob(samples: Sequence[Sample], size: int) -> bytes:
    """Returns a safetensors file with ``size`` bytes for each sample, beginning with its key."""
    number = len(samples)
    tensor = {"dtype": "U8", "shape": [number, 1, 1, size], "data_offsets": [0, number * size]}
    header = json.dumps({"images": tensor}).encode()
    parts = (part for each in samples for part in (each.key, *_filling(size - len(each.key))))
    return b"".join([struct.pack("<Q", len(header)), header, *parts])


@dataclass(frozen=True, slots=True)
class EmulatedWeights:
    """Weights that are nothing but a digest. The first one follows from the seed, later ones from
    what was trained (`bench.cluster.ledger`)."""

    digest: str

    def following(self, trained: str) -> "EmulatedWeights":
        """Returns the weights of a policy that follows the trained one, after one more batch."""
        return EmulatedWeights(hashlib.sha256(f"{self.digest} -> {trained}".encode()).hexdigest())

    @classmethod
    def first(cls, seed: int) -> "EmulatedWeights":
        return cls(hashlib.sha256(f"emulated weights/{seed}".encode()).hexdigest())
