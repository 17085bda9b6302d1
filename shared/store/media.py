"""Media in the store: raw pixels, or pixels compressed without loss to about half of the bytes.

Red and blue are stored as differences to green. A plane through the neighbours to the left, above,
and above left predicts each pixel. zlib (run lengths and Huffman codes) packs the residues: three
times as fast as PNG, and smaller. Both forms are safetensors objects.

    raw     images (n, C, H, W) or (n, F, C, H, W), uint8
    packed  packed (N,) uint8, all samples in one zlib stream, and shape (4 or 5,) int64
"""

import math
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from shared.errors import ContractError
from shared.store.tensor_header import check_header

RAW, PACKED, SHAPE = "images", "packed", "shape"
"""Names of tensors."""
COLOURS = 3
MAX_ZLIB_RATIO = 1032
"""Largest number of bytes that one byte of a zlib stream expands to."""
PIXEL = np.dtype(np.uint8)

Media: TypeAlias = "npt.NDArray[np.uint8]"
"""Images (n, C, H, W) or videos (n, F, C, H, W)."""
Shape = tuple[int, ...]


def pack(raw: bytes) -> bytes:
    """Returns raw media as a packed object; returns them unchanged if packing saves no bytes."""
    media = safetensors.numpy.load(raw)[RAW]
    stream = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    parts = [stream.compress(_residues(sample)) for sample in media]
    packed = b"".join([*parts, stream.flush()])
    compact = safetensors.numpy.save({
        PACKED: np.frombuffer(packed, PIXEL), SHAPE: np.array(media.shape, np.int64)
    })  # fmt: skip
    return compact if len(compact) < len(raw) else raw


def read(data: bytes, check: Callable[[Shape], None]) -> Media:
    """Reads media in either form.

    Args:
        check: receives their shape before unpacking; raises ContractError for a shape that is not
            allowed.

    Raises:
        ContractError: if the object holds anything else.
    """
    check_header(data, dtypes=("U8", "I64"))
    try:
        tensors = safetensors.numpy.load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ContractError(f"these media hold no {RAW}") from error
    if RAW in tensors:
        media: Media = tensors[RAW]
        if media.dtype != PIXEL:
            raise ContractError(f"these media have type {media.dtype}, not {PIXEL}")
        check(media.shape)
        return media
    packed, shape = _packed_parts(tensors)
    check(shape)
    return _unpack(packed, shape)


def _packed_parts(tensors: dict[str, npt.NDArray[Any]]) -> tuple[bytes, Shape]:
    packed, shape = tensors.get(PACKED), tensors.get(SHAPE)
    if packed is None or shape is None:
        raise ContractError(f"these media hold no {RAW}")
    if packed.dtype != PIXEL or packed.ndim != 1 or shape.dtype != np.int64 or shape.ndim != 1:
        raise ContractError("the tensors of these packed media have wrong types")
    lengths = tuple(map(int, shape))
    if len(lengths) not in (4, 5) or min(lengths) < 1:
        raise ContractError(f"packed media of shape {list(lengths)} are neither images nor videos")
    if math.prod(lengths) > MAX_ZLIB_RATIO * packed.size:
        raise ContractError(f"{packed.size} bytes cannot hold media of shape {list(lengths)}")
    return packed.tobytes(), lengths


def _unpack(packed: bytes, shape: Shape) -> Media:
    """Raises ContractError unless ``packed`` holds exactly the bytes of this shape."""
    stream, size = zlib.decompressobj(), math.prod(shape)
    try:
        data = stream.decompress(packed, size + 1)
    except zlib.error as error:
        raise ContractError(f"these media are not a valid zlib stream: {error}") from error
    if len(data) != size or not stream.eof or stream.unused_data:
        raise ContractError(f"these media do not hold the {size} bytes of their shape")
    media = np.frombuffer(bytearray(data), PIXEL).reshape(shape)
    for sample in media:
        _restore(sample)
    return media


def _residues(sample: Media) -> bytes:
    """Returns the prediction errors of a sample (..., C, H, W), modulo 256."""
    planes = sample.copy()
    if sample.shape[-3] == COLOURS:
        for colour in (0, 2):
            planes[..., colour, :, :] -= sample[..., 1, :, :]
    along_rows = planes.copy()
    along_rows[..., 1:] -= planes[..., :-1]
    residues = along_rows.copy()
    residues[..., 1:, :] -= along_rows[..., :-1, :]
    return residues.tobytes()


def _restore(sample: Media) -> None:
    """Turns the residues of a sample into its pixels, in place."""
    np.cumsum(sample, axis=-2, dtype=PIXEL, out=sample)
    np.cumsum(sample, axis=-1, dtype=PIXEL, out=sample)
    if sample.shape[-3] == COLOURS:
        for colour in (0, 2):
            sample[..., colour, :, :] += sample[..., 1, :, :]
