"""Two guards, because accuracy is not quality: images can please every classifier and look broken.

Distances are L2 over the 64 pixels in model space (-1..1). Real images score about 2.2 and 4.5.
"""

import numpy as np
import numpy.typing as npt

from digenrl.digits.data import NUM_DIGITS, Half, Images


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
    a = some.reshape(len(some), -1).astype(np.float64)
    b = others.reshape(len(others), -1).astype(np.float64)
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    rooted: npt.NDArray[np.float64] = np.sqrt(squares.clip(min=0))
    return rooted


def _mean_pairwise(images: Images) -> float:
    pairs = len(images) * (len(images) - 1)
    return float(distances(images, images).sum() / pairs) if pairs else float("nan")
