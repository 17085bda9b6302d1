"""Turns samples into the pictures and prompts that published networks take."""

import numpy as np
import numpy.typing as npt
from PIL import Image

from services.reward.scorer import Metadata


def picture(image: npt.NDArray[np.uint8]) -> Image.Image:
    """Converts an image (C, H, W): to gray if it has one channel, otherwise to RGB.

    Raises:
        ValueError: if it has another shape.
    """
    if image.ndim != 3 or image.shape[0] not in (1, 3):
        raise ValueError(f"an image (1 or 3, H, W) has no shape {image.shape}")
    rows = image[0] if image.shape[0] == 1 else np.ascontiguousarray(image.transpose(1, 2, 0))
    return Image.fromarray(rows)


def rgb(image: npt.NDArray[np.uint8]) -> Image.Image:
    """Convert an image (C, H, W) of any number of channels to RGB."""
    return picture(image).convert("RGB")


def prompts(metadata: Metadata) -> list[str]:
    """Returns the text of each sample's prompt.

    Raises:
        ValueError: if one has none.
    """
    texts = [each.get("prompt") for each in metadata]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError("a sample has no prompt to compare it with")
    return [str(text) for text in texts]
