"""VideoAlign (Liu et al. 2025, arXiv:2501.13918): how people rate videos that were made for a text.

A Qwen2-VL-2B reads the published question, and a head rates visual quality, motion quality and the
fit to the text. Each rating is normalised by the authors' mean and deviation; their sum is the
authors' overall rating. Question, frames, positions, LoRA, head and figures follow the authors'
code and weights (KwaiVGI/VideoAlign, Apache-2.0); `video_align.txt` is the question.

Frames come as they are; the authors read a compressed file. The frame rate decides how many frames
are shown: 8 per second, as DanceGRPO saves its videos, or `metadata.fps`.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.reward.scorer import Media, Metadata
from services.reward.scorers.inputs import prompts
from services.reward.scorers.qwen_reward import TOKEN_PIXELS, QwenReward, fit_size

QUESTION = Path(__file__).with_suffix(".txt").read_text()
TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
MEANS = torch.tensor([3.6757, 1.1646, 2.8105])
DEVIATIONS = torch.tensor([2.2476, 1.3811, 2.5121])
"""Normalisation of the three ratings."""
MIN_PIXELS, MAX_PIXELS = 128 * TOKEN_PIXELS * TOKEN_PIXELS, 256 * TOKEN_PIXELS * TOKEN_PIXELS
"""Limits on the pixels of a frame."""
FPS = 8.0
"""Frame rate of a video whose prompt does not name one."""
SHOWN_PER_S, MIN_FRAMES, MAX_FRAMES = 2.0, 4, 768


class VideoAlign:
    """Scores the sum of the three ratings."""

    RATINGS: tuple[int, ...] = (0, 1, 2)

    def __init__(self, folder: Path) -> None:
        self._network = QwenReward(folder, TOKENS, "video")

    def score(self, videos: Media, metadata: Metadata) -> list[float]:
        """Returns sums of ratings, each of which is about 0 with a spread of 1.

        Raises:
            ValueError: if a video has no prompt, fewer than two frames, or no frame rate.
        """
        scores = []
        for video, text, given in zip(videos, prompts(metadata), metadata, strict=True):
            frames = _frames(video, given.get("fps", FPS))
            question = QUESTION.replace("{text_prompt}", text)
            logits = self._network.outputs([frames], [question])[0, :, 0].cpu()
            scores.append(float(((logits - MEANS) / DEVIATIONS)[list(self.RATINGS)].sum()))
        return scores


class VideoQuality(VideoAlign):
    RATINGS = (0,)


class VideoMotion(VideoAlign):
    RATINGS = (1,)


class VideoText(VideoAlign):
    RATINGS = (2,)


def _frames(video: Media, fps: object) -> Tensor:
    """Returns the frames (F, 3, H, W) that the network sees, evenly spread and in its size."""
    most = min(MAX_FRAMES, len(video)) // 2 * 2
    if most < 2:
        raise ValueError("a video of one frame has no motion to rate")
    if not isinstance(fps, int | float) or not 0 < fps < float("inf"):
        raise ValueError(f"metadata.fps is {fps!r}, which is no frame rate")
    num = round(min(max(len(video) / fps * SHOWN_PER_S, MIN_FRAMES), most) / 2) * 2
    places = torch.linspace(0, len(video) - 1, num).round().long()
    height, width = video.shape[-2:]
    size = fit_size(height, width, MIN_PIXELS, MAX_PIXELS)
    pixels = torch.from_numpy(np.ascontiguousarray(video))[places].float().expand(-1, 3, -1, -1)
    sized = functional.interpolate(
        pixels, size, mode="bicubic", align_corners=False, antialias=True
    )
    return sized.clamp(0, 255).round()
