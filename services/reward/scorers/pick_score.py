"""PickScore (Kirstain et al. 2023, arXiv:2305.01569): which of two images people would pick.

Its network is a CLIP-H that was trained on choices; its score is the logit, the learned scale
times the cosine. Over 26, as Flow-GRPO uses it: typical images are then between 0.7 and 0.9, and
no image reaches 4 (the scale is at most 100).
"""

from pathlib import Path

from services.reward.scorer import Media, Metadata
from services.reward.scorers.clip import Clip

DIVISOR = 26.0


class PickScore:
    def __init__(self, folder: Path) -> None:
        """``folder`` holds yuvalkirstain/PickScore_v1 with CLIP-H's processor."""
        self._clip = Clip(folder)

    def score(self, images: Media, metadata: Metadata) -> list[float]:
        """Returns the published score over 26."""
        factor = self._clip.scale / DIVISOR
        return [factor * cosine for cosine in self._clip.cosines(images, metadata)]
