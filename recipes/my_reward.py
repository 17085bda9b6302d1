# How much of the ink is where digits of this kind have it, from -1 to 1.
# Every other image: the judges of the held-out accuracy were trained on the rest.
import numpy as np
from sklearn.datasets import load_digits

DATA = load_digits()
MEANS = np.stack([DATA.images[DATA.target == digit][::2].mean(0) for digit in range(10)])


def score(image, digit):
    return np.corrcoef(image[..., 0].ravel(), MEANS[digit].ravel())[0, 1]
