"""HPSv2 and HPSv2.1 (Wu et al. 2023, arXiv:2306.09341): which images people prefer.

A CLIP-H that was trained on preferences; the score is the plain cosine, from -1 to 1, most often
0.2 to 0.35. The tables of the paper print a hundred times that. An image that is not square gets
black margins, as in the published scorer.
"""

from pathlib import Path

from services.reward.scorer import Media, Metadata
from services.reward.scorers.clip import Clip


class HpsV2:
    def __init__(self, folder: Path) -> None:
        """``folder`` holds its weights under transformers' names, with CLIP-H's processor."""
        self._clip = Clip(folder, padded=True)

    def score(self, images: Media, metadata: Metadata) -> list[float]:
        """Returns scores from -1 to 1."""
        return self._clip.cosines(images, metadata)
