"""How large an image is as a JPEG file (DDPO, Black et al. 2023): rewards that need no weights.

Numbers depend on the build of libjpeg that Pillow was made with, in the last per mille.
"""

import io

import numpy as np
import numpy.typing as npt

from services.reward.scorer import Media, Metadata
from services.reward.scorers.inputs import picture

QUALITY = 95


class JpegIncompressibility:
    """Scores kilobytes: rich textures score high."""

    def score(self, images: Media, metadata: Metadata) -> list[float]:
        return [jpeg_bytes(image) / 1000 for image in images]


class JpegCompressibility:
    """Scores kilobytes over -500: smooth images score high, at most 0."""

    def score(self, images: Media, metadata: Metadata) -> list[float]:
        return [-jpeg_bytes(image) / 1000 / 500 for image in images]


def jpeg_bytes(image: npt.NDArray[np.uint8]) -> int:
    """Returns the size of an image (C, H, W), gray or RGB, at quality 95.

    Raises:
        ValueError: if it has another shape.
    """
    buffer = io.BytesIO()
    picture(image).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell()
