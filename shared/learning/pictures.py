"""Source images of prompts: which files are taken, and the pixels that they are.

A file is looked at before anything of it is decoded: PNG, JPEG or WebP, of at most
`MAX_PICTURE_BYTES`, its sides from `MIN_SIDE` to `MAX_SIDE` and at most `MAX_PIXELS`, and not
broken off. Generation and judges scale it to the samples' size, so that a source image and its
edited version are compared pixel by pixel.
"""

import io
from typing import Any

from shared.errors import ContractError
from shared.limits import MAX_PICTURE_BYTES

WHITE = "white"
MIN_SIDE, MAX_SIDE, MAX_PIXELS = 4, 16384, 64 << 20
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
_JPEG_END = b"\xff\xd9"
_WEBP = {b"VP8 ": (26, 2, 0x3FFF, 0), b"VP8L": (21, 2, 0x3FFF, 1), b"VP8X": (24, 3, 0xFFFFFF, 1)}
"""First chunk of a WebP file -> place and bytes of its width, mask, and what is to be added."""
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG's markers of a frame, which begins with its size."""


def check_picture(data: bytes) -> tuple[int, int]:
    """Return height and width of a PNG, JPEG or WebP file; nothing of it is decoded.

    Raises:
        ContractError: if it has another format, is too large, too small, or truncated.
    """
    if len(data) > MAX_PICTURE_BYTES:
        raise ContractError(
            f"has {len(data) >> 20} MiB; at most {MAX_PICTURE_BYTES >> 20}: make it smaller"
        )
    if data.startswith(_PNG):
        size = _png_size(data)
    elif data.startswith(_JPEG):
        size = _jpeg_size(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        size = _webp_size(data)
    else:
        raise ContractError("has another format than PNG, JPEG or WebP; convert it")
    height, width = size
    if min(size) < MIN_SIDE or max(size) > MAX_SIDE or height * width > MAX_PIXELS:
        raise ContractError(
            f"has {height} x {width} pixels; sides may be {MIN_SIDE} to {MAX_SIDE} and all pixels "
            f"{MAX_PIXELS}: scale it"
        )
    if _is_broken_off(data):
        raise ContractError("is a damaged image: it is broken off; save it again")
    return size


def decoded(data: bytes, *, height: int, width: int, channels: int, background: str = WHITE) -> Any:
    """Return the pixels (C, height, width), uint8, gray if ``channels`` is 1 and RGB otherwise:
    over ``background`` where they are transparent, scaled to cover that size, and cropped at the
    middle.

    Raises:
        ContractError: if the file has another format, or is damaged.
    """
    import numpy as np
    from PIL import Image, ImageOps

    check_picture(data)
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as opened:
            upright = ImageOps.exif_transpose(opened)
            if upright.has_transparency_data:
                upright = upright.convert("RGBA")
                below = Image.new("RGBA", upright.size, background)
                upright = Image.alpha_composite(below, upright)
            upright = upright.convert("L" if channels == 1 else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ContractError(f"is a damaged image: {error}") from error
    if upright.size != (width, height):
        upright = ImageOps.fit(upright, (width, height), Image.Resampling.LANCZOS)
    pixels = np.array(upright, dtype=np.uint8)  # a copy, which may be written to
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _png_size(data: bytes) -> tuple[int, int]:
    if len(data) < 26 or data[12:16] != b"IHDR":
        raise ContractError("is a damaged PNG; save it again")
    if data[24] == 16:
        raise ContractError("has 16 bits per channel; save it with 8")
    return int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")


def _is_broken_off(data: bytes) -> bool:
    """Whether the pixels of a file end early, as after an incomplete download."""
    if data.startswith(_JPEG):
        return data.find(_JPEG_END, _jpeg_frame(data)) < 0  # before it, a preview may end
    if data.startswith(b"RIFF"):
        return len(data) < 8 + int.from_bytes(data[4:8], "little")
    place = len(_PNG)
    while place + 8 <= len(data):
        length, kind = int.from_bytes(data[place : place + 4], "big"), data[place + 4 : place + 8]
        if kind == b"IDAT" and place + 8 + length > len(data):
            return True
        place += 12 + length
    return False


def _webp_size(data: bytes) -> tuple[int, int]:
    if len(data) < 30 or data[12:16] not in _WEBP:
        raise ContractError("is a damaged WebP; save it again")
    place, length, mask, more = _WEBP[data[12:16]]
    both = int.from_bytes(data[place : place + 2 * length], "little")
    shift = 14 if data[12:16] == b"VP8L" else 8 * length
    return (both >> shift & mask) + more, (both & mask) + more


def _jpeg_size(data: bytes) -> tuple[int, int]:
    place = _jpeg_frame(data)
    rows, columns = data[place + 5 : place + 7], data[place + 7 : place + 9]
    return int.from_bytes(rows, "big"), int.from_bytes(columns, "big")


def _jpeg_frame(data: bytes) -> int:
    """Return where the header of a JPEG's frame begins."""
    place = 2
    while place + 9 <= len(data) and data[place] == 0xFF:
        marker, length = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        if marker == 0xFF:  # a byte that only fills
            place += 1
        elif marker in _FRAME_HEADERS:
            return place
        else:
            place += 2 + length
    raise ContractError("is a damaged JPEG; save it again")
