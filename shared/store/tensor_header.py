"""Checks the header of a safetensors object before any of it is trusted or allocated."""

import json
import math
from collections.abc import Collection, Mapping
from mmap import mmap
from typing import Any, TypeAlias

from shared.errors import ContractError
from shared.limits import MAX_DIMENSIONS, MAX_HEADER_BYTES, MAX_TENSORS

Data: TypeAlias = "bytes | mmap"
"""An object's bytes: in memory, or of a file that several processes map."""
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip
"""Bits of each type that objects may hold; others, such as fp8, lack arithmetic on some devices."""


def check_header(data: Data, dtypes: Collection[str] = tuple(BITS)) -> None:
    """Raises ContractError unless ``data`` begin with a header of valid size, types and shapes, and
    have the length in the header."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= size <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise ContractError("not a safetensors object: its header is cut off or too large")
    try:
        header = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError) as error:
        raise ContractError("not a safetensors object: its header is not JSON") from error
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise ContractError(f"not a safetensors object: more than {MAX_TENSORS} tensors")
    for name, tensor in header.items():
        if name != "__metadata__":
            _check_tensor(name, tensor, dtypes, len(data) - 8 - size)


def _check_tensor(name: str, tensor: Any, dtypes: Collection[str], num_bytes: int) -> None:
    if not isinstance(tensor, Mapping):
        raise ContractError(f"not a safetensors object: {name[:80]!r} is no tensor")
    dtype, shape = tensor.get("dtype"), tensor.get("shape")
    if not isinstance(dtype, str) or dtype not in dtypes:
        raise ContractError(
            f"{name[:80]!r} has type {str(dtype)[:20]}, not {_alternatives(dtypes)}"
        )
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMENSIONS
        or not all(map(_is_length, shape))
    ):
        raise ContractError(f"{name[:80]!r} has no shape of at most {MAX_DIMENSIONS} dimensions")
    if math.prod(shape) * BITS[dtype] > 8 * num_bytes:
        raise ContractError(f"{name[:80]!r} is larger than the object that holds it")


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _alternatives(dtypes: Collection[str]) -> str:
    return " or ".join(dtypes)
