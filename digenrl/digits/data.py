"""The real digits: scikit-learn's 1797 scanned numerals, in two halves that never meet.

The reward is trained on half A and gold rewards on half B, so that what fools one need not fool the
others. Model space is what the generator works in: pixels 0..16 become -1..1.

Two guards tell whether samples look like them, because accuracy is not quality: images can please
every classifier and look broken. Distances are L2 over the 64 pixels in model space; real images
score about 2.2 and 4.5.
"""

import math
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
    half_a, half_b = (
        Half(images[chosen], labels[chosen].astype(np.int64))
        for chosen in (rank % 2 == 0, rank % 2 == 1)
    )
    return half_a, half_b


def to_uint8(images: Images) -> npt.NDArray[np.uint8]:
    """Converts images (n, 1, 8, 8) from model space to the bytes that a scorer gets."""
    return np.asarray(np.rint((images + 1) * 127.5).clip(0, 255), dtype=np.uint8)


def nearest_real(samples: Half, real: Half) -> npt.NDArray[np.float64]:
    """Returns nn (10,): the mean distance of each digit's samples to the nearest real image.

    Nearest of any digit, so that it says how real the glyphs are and not whether they are right.
    It rises when glyphs break.
    """
    return np.array(
        [
            distances(samples.of_digit(digit), real.images).min(axis=1).mean()
            for digit in range(NUM_DIGITS)
        ]
    )


def diversity(samples: Half) -> npt.NDArray[np.float64]:
    """Returns div (10,): the mean distance of two samples of a digit; it falls if they collapse."""
    return np.array([_mean_pairwise(samples.of_digit(digit)) for digit in range(NUM_DIGITS)])


def distances(some: Images, others: Images) -> npt.NDArray[np.float64]:
    """Returns L2 distances (n, m) between images."""
    pixels = math.prod(others.shape[1:])
    a, b = (each.reshape(-1, pixels).astype(np.float64) for each in (some, others))
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    rooted: npt.NDArray[np.float64] = np.sqrt(squares.clip(min=0))
    return rooted


def _mean_pairwise(images: Images) -> float:
    pairs = len(images) * (len(images) - 1)
    return float(distances(images, images).sum() / pairs) if pairs else float("nan")
