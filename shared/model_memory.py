"""How much memory a model folder's weights take, read from file headers without loading them."""

import json
import math
import struct
from pathlib import Path

from shared.errors import UserError

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MAX_HEADER = 64 * 1024 * 1024


def weight_bytes(folder: Path, dtype: str) -> int:
    """Bytes of every tensor below ``folder``, held as ``dtype``.

    Raises:
        UserError: if a file is no safetensors file.
    """
    return sum(
        math.prod(tensor["shape"]) * ITEM_BYTES[dtype]
        for file in sorted(folder.rglob("*.safetensors"))
        for name, tensor in _header(file).items()
        if name != "__metadata__"
    )


def _header(file: Path) -> dict[str, dict[str, list[int]]]:
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > MAX_HEADER:
                raise ValueError("its header is too long")
            header: dict[str, dict[str, list[int]]] = json.loads(stream.read(size))
            return header
    except (OSError, ValueError, struct.error) as error:
        raise UserError(f"model.folder: {file} is not a safetensors file: {error}") from error
