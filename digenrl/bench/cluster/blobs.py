"""What emulated devices store: bytes of the right number, told apart by what they stand for.

An adapter begins with the digest of the weights that it stands for; media are a safetensors file,
as the reward service reads it. The rest of every object is the same random bytes.
"""

import hashlib
import json
import random
import struct
from dataclasses import dataclass
from functools import lru_cache

from shared.errors import ContractError

DIGEST_BYTES = 64
SEED_BYTES = 8
_MIB = 1 << 20


@lru_cache(maxsize=1)
def _noise() -> bytes:
    return random.Random(0).randbytes(_MIB)


def filled(head: bytes, size: int) -> bytes:
    """``head``, and random bytes up to ``size``."""
    return b"".join([head, *_filling(size - len(head))])


def _filling(size: int) -> list[bytes]:
    """Copied once only, by whoever joins it."""
    whole, rest = divmod(max(0, size), _MIB)
    return [*[_noise()] * whole, _noise()[:rest]]


def adapter_blob(digest: str, size: int) -> bytes:
    """``digest``: of the weights that it stands for."""
    return filled(digest.encode(), size)


def digest_of(adapter: bytes) -> str:
    """Of the weights that it stands for.

    Raises:
        ContractError: if it is no adapter of an emulated device.
    """
    head = adapter[:DIGEST_BYTES]
    if len(head) != DIGEST_BYTES or set(head) - set(b"0123456789abcdef"):
        raise ContractError("this is no adapter of an emulated device")
    return head.decode()


def media_blob(seeds: list[int], size: int) -> bytes:
    """A safetensors file with ``size`` bytes for each sample, beginning with its seed."""
    number = len(seeds)
    tensor = {"dtype": "U8", "shape": [number, 1, 1, size], "data_offsets": [0, number * size]}
    header = json.dumps({"images": tensor}).encode()
    samples = (part for seed in seeds for part in (_head(seed), *_filling(size - SEED_BYTES)))
    return b"".join([struct.pack("<Q", len(header)), header, *samples])


def _head(seed: int) -> bytes:
    return seed.to_bytes(SEED_BYTES, "big")


@dataclass(frozen=True, slots=True)
class EmulatedWeights:
    """Weights that are nothing but their name: each follows from the one before."""

    digest: str

    @classmethod
    def first(cls, run: str) -> "EmulatedWeights":
        return cls(hashlib.sha256(run.encode()).hexdigest())

    def after(self, batch: int) -> "EmulatedWeights":
        return EmulatedWeights(hashlib.sha256(f"{self.digest}/{batch}".encode()).hexdigest())
