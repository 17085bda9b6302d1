"""Rewards of videos that need no weights."""

import numpy as np

from services.reward.scorer import Media, Metadata


class TemporalConsistency:
    """Scores 1 less the mean change from one frame to the next, from 0 to 1: flicker scores low.

    A still video scores 1, so give this reward a small weight next to a reward for content.
    """

    def score(self, videos: Media, metadata: Metadata) -> list[float]:
        """Raises ValueError if there is nothing to compare: a video of one frame."""
        if videos.shape[1] < 2:
            raise ValueError("a video of one frame has no consistency")
        change = np.abs(np.diff(videos.astype(np.int16), axis=1)) / 255
        scores: list[float] = (1 - change.reshape(len(videos), -1).mean(1)).tolist()
        return scores
