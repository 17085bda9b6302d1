"""Rewards of the digits demo: the probability that an image shows the digit that its prompt names.

Four files without pickle make up the folder: ``proxy`` (a CNN, the reward), ``gold_mlp`` and
``gold_svm`` (gold rewards that the training never sees, trained on the other half of the data) and
``real`` (images of that half). Images are uint8 (n, 1, 8, 8); inside, -1..1.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view
from safetensors.numpy import load_file

from services.reward.prompt_checks import NUM_DIGITS, wanted_digit
from services.reward.scorer import Media, Metadata

SHAPE = (1, 8, 8)

Network = Literal["proxy", "gold_mlp"]
Values = npt.NDArray[np.float64]
"""Independent of the batch that an image is in, once they are rounded to float32."""


class DigitProbability:
    """Scores the probability of ``metadata["digit"]`` under one of the networks, in numpy: layers
    with ReLUs between, and after the second convolution a maximum over 2 x 2 pixels."""

    def __init__(self, folder: Path, network: Network = "proxy") -> None:
        tensors = load_file(folder / f"{network}.safetensors")
        names = sorted({name.partition(".")[0] for name in tensors}, key=int)
        self._layers = [(tensors[f"{each}.weight"], tensors[f"{each}.bias"]) for each in names]

    def score(self, images: Media, metadata: Metadata) -> list[float]:
        """Returns one probability per image.

        Raises:
            ValueError: if an image is not 8 x 8 with one channel, or its metadata has no digit.
        """
        digits = [wanted_digit(one) for one in metadata]
        if len(digits) != len(images):
            raise ValueError(f"{len(images)} images but metadata of {len(digits)}")
        probabilities = self.probabilities(images)
        return [float(row[digit]) for row, digit in zip(probabilities, digits, strict=True)]

    def probabilities(self, images: Media) -> npt.NDArray[np.float32]:
        """Returns (n, 10) probabilities of images (n, 1, 8, 8)."""
        values: Values = to_model_space(images).astype(np.float64)
        for number, (weight, bias) in enumerate(self._layers):
            values = np.maximum(values, 0) if number else values
            if weight.ndim == 4:
                values = _convolve(values, weight) + bias[:, None, None]
                if number == 1:
                    values = values.reshape(*values.shape[:2], 4, 2, 4, 2).max((3, 5))
            else:
                values = values.reshape(len(values), -1) @ weight.T + bias
        shares = np.exp(values - values.max(-1, keepdims=True))
        return np.asarray(shares / shares.sum(-1, keepdims=True), dtype=np.float32)

    def predict(self, images: Media) -> npt.NDArray[np.int64]:
        """Returns the most probable digits (n,) of images (n, 1, 8, 8)."""
        return np.asarray(self.probabilities(images).argmax(-1), dtype=np.int64)


class DigitSvm:
    """Evaluates a support vector machine with an RBF kernel, scikit-learn's SVC, in numpy."""

    def __init__(self, folder: Path) -> None:
        arrays = load_file(folder / "gold_svm.safetensors")
        self._vectors = arrays["support_vectors"]
        self._weights = arrays["dual_coef"]
        self._intercepts = arrays["intercept"]
        self._gamma = float(arrays["gamma"][0])
        ends = np.cumsum(arrays["n_support"]).tolist()
        self._of_class = [slice(*bounds) for bounds in zip([0, *ends[:-1]], ends, strict=True)]

    def predict(self, images: Media) -> npt.NDArray[np.int64]:
        """Returns digits (n,) that win most of the 45 duels, the smaller one of equals."""
        kernel = self._kernel(to_model_space(images).reshape(len(images), -1))
        votes = np.zeros((len(images), NUM_DIGITS), dtype=np.int64)
        pairs = [(a, b) for a in range(NUM_DIGITS) for b in range(a + 1, NUM_DIGITS)]
        for (a, b), intercept in zip(pairs, self._intercepts, strict=True):
            in_a, in_b = self._of_class[a], self._of_class[b]
            margin = kernel[:, in_a] @ self._weights[b - 1, in_a]
            margin += kernel[:, in_b] @ self._weights[a, in_b]
            a_wins = margin + intercept > 0
            votes[:, a] += a_wins
            votes[:, b] += ~a_wins
        return np.asarray(votes.argmax(-1), dtype=np.int64)

    def _kernel(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Returns (n, support vectors) from rows (n, 64)."""
        differences = rows[:, None].astype(np.float64) - self._vectors[None]
        kernel: npt.NDArray[np.float64] = np.exp(-self._gamma * (differences**2).sum(-1))
        return kernel


def _convolve(values: Values, weight: npt.NDArray[np.float32]) -> Values:
    """Returns (n, out, H, W) of values (n, in, H, W) and kernels (out, in, 3, 3), with zeros around
    the values."""
    padded = np.pad(values, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = sliding_window_view(padded, (3, 3), axis=(2, 3))
    return np.moveaxis(np.tensordot(windows, weight, ((1, 4, 5), (1, 2, 3))), -1, 1)


def to_model_space(images: Media) -> npt.NDArray[np.float32]:
    """Converts bytes (n, 1, 8, 8) to -1..1."""
    if images.dtype != np.uint8 or images.shape[1:] != SHAPE:
        raise ValueError(
            f"a digit scorer needs uint8 images (n, 1, 8, 8); got {images.dtype} {images.shape}"
        )
    return (images.astype(np.float32) / 127.5) - 1
