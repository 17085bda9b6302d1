"""LAION's aesthetic predictor, version 2 (Schuhmann 2022): how well people would rate an image.

A head of linear layers on the unit vector that CLIP ViT-L/14 gives to an image. It was trained
on ratings from 1 to 10; good photographs get 6 or 7, and scores may be outside these bounds. The
prompt plays no part.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from services.reward.scorer import Media, Metadata
from services.reward.scorers.clip import Clip
from services.reward.scorers.pretrained import as_folder_error, linear_head

HEAD = "aesthetic.safetensors"


class Aesthetic:
    def __init__(self, folder: Path) -> None:
        """``folder`` holds openai/clip-vit-large-patch14, and the head as `aesthetic.safetensors`,
        named as LAION publishes it (``layers.0.weight``, ...)."""
        self._clip = Clip(folder)
        with as_folder_error(folder):
            tensors = load_file(folder / HEAD)
        self._head = linear_head(tensors, self._clip.width, folder)

    @torch.inference_mode()
    def score(self, images: Media, metadata: Metadata) -> list[float]:
        """Returns scores of about 1 to 10."""
        scores: list[float] = self._head(self._clip.image_vectors(images))[:, 0].tolist()
        return scores
