"""The real digits: scikit-learn's 1797 scanned numerals, in two halves that never meet.

The reward is trained on half A and gold rewards on half B, so that what fools one need not fool the
others. Model space is what the generator works in: pixels 0..16 become -1..1.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.float32]
"""(n, 1, 8, 8) in model space."""
Labels = npt.NDArray[np.int64]
"""(n,) digits 0..9."""

SIZE = 8
NUM_DIGITS = 10


@dataclass(frozen=True, slots=True)
class Half:
    images: Images
    labels: Labels

    def of_digit(self, digit: int) -> Images:
        return np.asarray(self.images[self.labels == digit], dtype=np.float32)


def load_halves() -> tuple[Half, Half]:
    """Returns halves A and B: every other image of each digit, in the order of the data set."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 1, SIZE, SIZE) / 8 - 1).astype(np.float32)
    rank = np.zeros(len(labels), dtype=np.int64)
    for digit in range(NUM_DIGITS):
        rank[labels == digit] = np.arange((labels == digit).sum())
    return _half(images, labels, rank % 2 == 0), _half(images, labels, rank % 2 == 1)


def to_uint8(images: Images) -> npt.NDArray[np.uint8]:
    """Converts images (n, 1, 8, 8) from model space to the bytes that a scorer gets."""
    return np.asarray(np.rint((images + 1) * 127.5).clip(0, 255), dtype=np.uint8)


def _half(images: Images, labels: Labels, chosen: npt.NDArray[np.bool_]) -> Half:
    return Half(images[chosen], labels[chosen].astype(np.int64))
