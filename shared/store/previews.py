"""Previews in the store: a small picture of each sample of a fragment.

The preview of a video is its middle frame.

An object is a list of PNG or JPEG files, packed by msgpack. Readers trust only the properties
checked here.
"""

from io import BytesIO
from typing import TYPE_CHECKING

import msgpack

from shared.errors import ContractError

if TYPE_CHECKING:
    from PIL.Image import Image

    from shared.store.media import Media

MAX_SIDE = 160
"""Largest height and width in pixels."""
MAX_UNSCALED_SIDE = 64
"""Largest height and width of a picture that is stored unscaled, as PNG."""
QUALITIES = (80, 50, 20)
"""JPEG qualities in the order of the attempts; the first small enough file is stored."""
KINDS = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}
"""First bytes of a file, and its content type."""


def pack_previews(raw: bytes, max_bytes: int) -> bytes:
    """Return the previews of all samples of an object of media.

    Args:
        max_bytes: maximum size of a preview.
    """
    from shared.store.media import read  # needs numpy, which readers of previews do not

    pictures = read(raw, lambda shape: None)
    return bytes(msgpack.packb([_preview(each, max_bytes) for each in pictures]))


def shrink(picture: bytes, max_side: int) -> bytes:
    """Return a picture as JPEG with at most this height and width, and small ones as they are."""
    from PIL import Image

    image = Image.open(BytesIO(picture))
    if max(image.size) <= max_side:
        return picture
    image.thumbnail((max_side, max_side))
    return _encode(image.convert("RGB"), "JPEG", quality=QUALITIES[0])


def unpack_previews(data: bytes) -> list[bytes]:
    """Return the pictures of an object; raises ContractError if it holds anything else."""
    try:
        previews = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise ContractError("this object holds no previews") from error
    if not isinstance(previews, list) or not all(isinstance(each, bytes) for each in previews):
        raise ContractError("this object holds no previews")
    for each in previews:
        content_type(each)
    return previews


def content_type(picture: bytes) -> str:
    """Return the content type of a picture by its first bytes.

    Raises:
        ContractError: if the picture is neither PNG nor JPEG.
    """
    for beginning, kind in KINDS.items():
        if picture.startswith(beginning):
            return kind
    raise ContractError("this preview is neither PNG nor JPEG")


def _preview(sample: "Media", max_bytes: int) -> bytes:
    import numpy as np
    from PIL import Image

    from shared.store.media import COLOURS

    frame = sample if sample.ndim == 3 else sample[len(sample) // 2]
    pixels = frame.transpose(1, 2, 0) if len(frame) == COLOURS else frame[0]
    image = Image.fromarray(np.ascontiguousarray(pixels))
    is_small = max(image.size) <= MAX_UNSCALED_SIDE
    if is_small and len(data := _encode(image, "PNG")) <= max_bytes:
        return data
    side = MAX_SIDE
    while True:
        image.thumbnail((side, side))
        for quality in QUALITIES:
            if len(data := _encode(image, "JPEG", quality=quality)) <= max_bytes:
                return data
        side //= 2


def _encode(image: "Image", kind: str, **options: int) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
