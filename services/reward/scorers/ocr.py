"""Scores whether an image shows the words that its prompt asks for, as RapidOCR reads them.

As Flow-GRPO scores text: the wanted text is what stands between the prompt's first two double
quotes; spaces and case do not count. 1 if it is part of what is read, otherwise 1 less the edit
distance over the length of the wanted text, at least 0. Nothing read is 0.
"""

import numpy as np
import numpy.typing as npt
from rapidfuzz.distance import Levenshtein

from services.reward.prompt_checks import wanted_text, without_spaces
from services.reward.scorer import Media, Metadata


class OcrText:
    def __init__(self, threads: int = 1) -> None:
        from rapidocr import RapidOCR

        self._engine = RapidOCR(
            params={
                "Global.log_level": "critical",
                "Global.text_score": 0.0,
                "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            }
        )

    def score(self, images: Media, metadata: Metadata) -> list[float]:
        """Return scores from 0 to 1; raises ValueError if a prompt does not quote its text."""
        wanted = [wanted_text(each) for each in metadata]
        return [
            text_score(text, self.read(image)) for text, image in zip(wanted, images, strict=True)
        ]

    def read(self, image: npt.NDArray[np.uint8]) -> str:
        """Returns all text in an image (C, H, W), gray or RGB."""
        rgb = np.repeat(image, 3, axis=0) if image.shape[0] == 1 else image
        bgr = np.ascontiguousarray(rgb[::-1].transpose(1, 2, 0))
        pieces = self._engine(bgr).txts or ()
        return "".join(pieces)


def text_score(wanted: str, read: str) -> float:
    """Returns a score from 0 to 1.

    >>> text_score("hello", "say Hello!"), text_score("hello", "hallo"), text_score("hi", "")
    (1.0, 0.8, 0.0)
    """
    read = without_spaces(read)
    if wanted in read:
        return 1.0
    distance = min(Levenshtein.distance(wanted, read), len(wanted))
    return 1 - distance / len(wanted)
