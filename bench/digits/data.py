"""The real digits: scikit-learn's 1797 scanned numerals, in two halves that never meet.

The reward is trained on half A and gold rewards on half B, so that what fools one need not fool the
others.
"""

import numpy as np
import numpy.typing as npt

from digenrl.evaluation.digits import NUM_DIGITS, DataSplit, Images

SIZE = 8


def load_halves() -> tuple[DataSplit, DataSplit]:
    """Returns halves A and B: every other image of each digit, in the order of the data set."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 1, SIZE, SIZE) / 8 - 1).astype(np.float32)
    rank = np.zeros(len(labels), dtype=np.int64)
    for digit in range(NUM_DIGITS):
        rank[labels == digit] = np.arange((labels == digit).sum())
    half_a, half_b = (
        DataSplit(images[chosen], labels[chosen].astype(np.int64))
        for chosen in (rank % 2 == 0, rank % 2 == 1)
    )
    return half_a, half_b


def to_uint8(images: Images) -> npt.NDArray[np.uint8]:
    """Converts images (n, 1, 8, 8) from model space to the bytes that a scorer gets."""
    return np.asarray(np.rint((images + 1) * 127.5).clip(0, 255), dtype=np.uint8)
