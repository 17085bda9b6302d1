"""CLIPScore (Hessel et al. 2021, arXiv:2104.08718): how well an image fits its prompt.

2.5 times the cosine of the two CLIP vectors, and 0 where that is negative: from 0 to 2.5, and
hardly ever above 1 with OpenAI's weights. The paper puts "A photo depicts" before a caption; here
the prompt stands alone, as it names the kind of picture itself.
"""

from pathlib import Path

from services.reward.scorer import Media, Metadata
from services.reward.scorers.clip import Clip

WEIGHT = 2.5


class ClipScore:
    def __init__(self, folder: Path) -> None:
        """``folder`` holds a CLIP, such as openai/clip-vit-large-patch14."""
        self._clip = Clip(folder)

    def score(self, images: Media, metadata: Metadata) -> list[float]:
        """Returns scores from 0 to 2.5."""
        return [WEIGHT * max(cosine, 0.0) for cosine in self._clip.cosines(images, metadata)]
