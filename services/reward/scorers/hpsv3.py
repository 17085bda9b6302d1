"""HPSv3 (Ma et al. 2025, arXiv:2508.03789): human preference for images of any kind.

A Qwen2-VL-7B reads the published question, and a head gives the mean and the spread of the score;
the score is the mean, mostly between -5 and 15. Question, size of images, positions and head follow
the authors' code (MizzenAI/HPSv3, MIT); `hpsv3.txt` is the question.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from services.reward.scorer import Media, Metadata
from services.reward.scorers.inputs import prompts, rgb
from services.reward.scorers.qwen_reward import TOKEN_PIXELS, QwenReward, fit_size

QUESTION = Path(__file__).with_suffix(".txt").read_text()
PIXELS = 256 * TOKEN_PIXELS * TOKEN_PIXELS
"""Least and most pixels of an image."""
PASS_IMAGES = 4


class HpsV3:
    def __init__(self, folder: Path) -> None:
        self._network = QwenReward(folder, ["<|Reward|>"], "image")

    def score(self, images: Media, metadata: Metadata) -> list[float]:
        """Returns the published means; raises ValueError if an image has no prompt."""
        questions = [QUESTION.replace("{text_prompt}", text) for text in prompts(metadata)]
        scores: list[float] = []
        for first in range(0, len(images), PASS_IMAGES):
            some = slice(first, first + PASS_IMAGES)
            pixels = [_frames(rgb(image)) for image in images[some]]
            scores += self._network.outputs(pixels, questions[some])[:, 0, 0].tolist()
        return scores


def _frames(picture: Image.Image) -> Tensor:
    """Returns an image as two equal frames (2, 3, H, W)."""
    height, width = fit_size(picture.height, picture.width, PIXELS, PIXELS)
    sized = np.array(picture.resize((width, height), Image.Resampling.BICUBIC))
    return torch.from_numpy(sized).permute(2, 0, 1).expand(2, -1, -1, -1)
