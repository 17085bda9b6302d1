"""The judge of the editing demo: whether a digit was edited as its prompt demands, and is still
legible.

It measures what an edit changes, ink, slope and likeness to the source, and compares no pixels with
the wanted image, as the demo's reward does. Then the first demo's held-out classifier has to read
the digit, after ink and paper are swapped back, or the slant is undone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.reward.prompt_checks import wanted_digit, wanted_edit
from services.reward.scorer import SOURCES, Media, Metadata
from services.reward.scorers.digits import DigitProbability

MIN_INK_RATIO = 1.15
"""Least ink of a thicker digit, over the source's."""
SLOPE = 0.15
"""Least change of a slanted digit's slope, in pixels to the right per row upwards."""
MIN_SOURCE_CORRELATION = 0.5
"""Least correlation of pixels with the source, negative for an inverted picture."""

Ink = npt.NDArray[np.float64]
"""(8, 8), 0 is paper and 1 is ink."""


class DigitEdit:
    """Scores 1 if a sample has the edit of its metadata's ``edit`` and shows the digit, else 0."""

    def __init__(self, folder: Path) -> None:
        self._classifier = DigitProbability(folder, "gold_mlp")

    def score(self, images: Media, metadata: Metadata) -> list[float]:
        """Returns 0 or 1 per image.

        Raises:
            ValueError: if there is no source image, edit or digit in the metadata.
        """
        edits = [wanted_edit(one) for one in metadata]
        digits = [wanted_digit(one) for one in metadata]
        upright = [_undone(image, edit) for image, edit in zip(images, edits, strict=True)]
        read = self._classifier.predict(np.stack(upright))
        sources = [_source(one)[0] for one in metadata]
        edits_of_images = [
            recognise_edit(one, image[0]) for one, image in zip(sources, images, strict=True)
        ]
        rows = zip(edits, edits_of_images, digits, read.tolist(), strict=True)
        return [
            float(edit == edit_of_image and digit == digit_of_image)
            for edit, edit_of_image, digit, digit_of_image in rows
        ]


def _undone(image: npt.NDArray[np.uint8], edit: str) -> npt.NDArray[np.uint8]:
    """Returns an image (1, 8, 8) as the classifier reads it: ink on paper, upright."""
    if edit == "invert":
        return 255 - image
    if edit == "slant":
        return np.concatenate(
            [np.roll(image[:, :3], -1, 2), image[:, 3:5], np.roll(image[:, 5:], 1, 2)], axis=1
        )
    return image


def recognise_edit(source: npt.NDArray[np.uint8], sample: npt.NDArray[np.uint8]) -> str | None:
    """Return the edit that turns the source into the sample (8, 8); None if no known edit does."""
    before, after = source / 255.0, sample / 255.0
    likeness = _correlation(before, after)
    if likeness <= -MIN_SOURCE_CORRELATION:
        return "invert"
    if likeness < 0.2:
        return None
    turned, grown = slope(after) - slope(before), after.sum() / max(before.sum(), 1e-6)
    if grown >= MIN_INK_RATIO and abs(turned) < SLOPE:
        return "thicken"
    return "slant" if turned >= SLOPE and grown < MIN_INK_RATIO else None


def slope(ink: Ink) -> float:
    """Returns how far strokes lean, by the ink's moments: pixels to the right per row upwards."""
    rows, columns = np.indices(ink.shape)
    weight = ink / max(float(ink.sum()), 1e-6)
    up = (weight * rows).sum() - rows
    right = columns - (weight * columns).sum()
    return float((weight * up * right).sum() / max(float((weight * up * up).sum()), 1e-6))


def _correlation(before: Ink, after: Ink) -> float:
    if before.std() < 1e-6 or after.std() < 1e-6:
        return 0.0
    return float(np.corrcoef(before.ravel(), after.ravel())[0, 1])


def _source(metadata: Mapping[str, object]) -> npt.NDArray[np.uint8]:
    sources: Any = metadata.get(SOURCES, ())
    if not sources:
        raise ValueError("a judge of edits needs the prompt's source image")
    return np.asarray(sources[0], dtype=np.uint8)
