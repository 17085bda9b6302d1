"""Tensors of a safetensors file that is mapped into memory: they lie in it, nothing is copied."""

import json
import math
from mmap import mmap
from typing import get_args

import torch
from torch import Tensor

from shared.errors import ContractError
from shared.run.manifest import DType
from shared.store.tensor_header import check_header

DTYPES = dict(zip(
    get_args(DType),
    (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool,
    ),
    strict=True,
))  # fmt: skip


def unpack_mapped(data: mmap) -> dict[str, Tensor]:
    """Read the tensors of a private mapping, which exists as long as one of the tensors.

    Raises:
        ContractError: unless it is a complete safetensors file of sane size.
    """
    check_header(data)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {name: _tensor(data, start, name, each) for name, each in header.items()}


def _tensor(data: mmap, start: int, name: str, entry: dict[str, object]) -> Tensor:
    dtype, shape, place = DTYPES[str(entry["dtype"])], entry["shape"], entry.get("data_offsets")
    assert isinstance(shape, list)  # by `check_header`
    count = math.prod(shape)
    match place:
        case [int(first), int(last)] if (
            0 <= first <= last <= len(data) - start and last - first == count * dtype.itemsize
        ):
            if not count:
                return torch.empty(shape, dtype=dtype)
            tensor = torch.frombuffer(data, dtype=dtype, count=count, offset=start + first)
            return tensor.view(shape)
    raise ContractError(f"not a safetensors object: {name[:80]!r} does not lie in it")
