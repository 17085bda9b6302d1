"""How much samples of the demo look like real digits, because accuracy is not quality: images can
please every classifier and look broken.

Model space is what the generator works in: pixels 0..16 become -1..1. Distances are L2 over the 64
pixels there; real images score about 2.2 and 4.5.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Images = npt.NDArray[np.float32]
"""(n, 1, 8, 8) in model space."""
Labels = npt.NDArray[np.int64]
"""(n,) digits 0..9."""

NUM_DIGITS = 10


@dataclass(frozen=True, slots=True)
class DataSplit:
    images: Images
    labels: Labels

    def of_digit(self, digit: int) -> Images:
        return np.asarray(self.images[self.labels == digit], dtype=np.float32)


def load_real(folder: Path) -> DataSplit:
    """Reads the real images that came with the rewards: half B, (n, 1, 8, 8)."""
    arrays = load_file(folder / "real.safetensors")
    return DataSplit(arrays["images"], arrays["labels"])


def nearest_real(samples: DataSplit, real: DataSplit) -> npt.NDArray[np.float64]:
    """Returns nn (10,): the mean distance of each digit's samples to the nearest real image.

    Distance to the nearest real digit of any class: how real the glyphs are, not whether they are
    right. It rises when glyphs break.
    """
    return np.array(
        [
            distances(samples.of_digit(digit), real.images).min(axis=1).mean()
            for digit in range(NUM_DIGITS)
        ]
    )


def diversity(samples: DataSplit) -> npt.NDArray[np.float64]:
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
