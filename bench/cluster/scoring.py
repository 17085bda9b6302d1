"""An emulated scorer: the profile counts scoring as part of a fragment, so it takes no time."""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

HEAD = 64
"""Bytes of a sample that its score follows from; its key is among them."""


class EmulatedScorer:
    def score(
        self, images: npt.NDArray[np.uint8], metadata: Sequence[Mapping[str, object]]
    ) -> list[float]:
        """Returns scores between 0 and 1, as good as random, and the same for the same sample."""
        heads = images.reshape(len(images), -1)[:, :HEAD]
        return [zlib.crc32(head.tobytes()) / 2**32 for head in heads]
