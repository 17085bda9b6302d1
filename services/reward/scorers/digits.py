"""Rewards of the digits demo: the probability that an image shows the digit that its prompt names.

Four files without pickle make up the folder: ``proxy`` (a CNN, the reward), ``gold_mlp`` and
``gold_svm`` (gold rewards that the training never sees, trained on the other half of the data) and
``real`` (images of that half). Images are uint8 (n, 1, 8, 8); inside, -1..1.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn

from services.reward.prompt_checks import NUM_DIGITS, wanted_digit
from services.reward.scorer import Media, Metadata

SHAPE = (1, 8, 8)

Network = Literal["proxy", "gold_mlp"]


def proxy_network() -> nn.Module:
    """Builds a CNN of 40 k parameters: (n, 1, 8, 8) to logits (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(512, 50), nn.ReLU(), nn.Linear(50, NUM_DIGITS),
    )  # fmt: skip


def gold_network() -> nn.Module:
    """Builds an MLP of 26 k parameters, which has no reason to be fooled by what fools the CNN."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
        nn.Linear(128, NUM_DIGITS),
    )  # fmt: skip


NETWORKS = {"proxy": proxy_network, "gold_mlp": gold_network}


class DigitProbability:
    """Scores the probability of ``metadata["digit"]`` under one of the networks."""

    def __init__(self, folder: Path, network: Network = "proxy") -> None:
        self._network = NETWORKS[network]()
        tensors = load_file(folder / f"{network}.safetensors")
        state = {name: torch.from_numpy(array) for name, array in tensors.items()}
        self._network.load_state_dict(state)
        self._network.requires_grad_(False).eval()

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
        logits: Tensor = self._network(torch.from_numpy(to_model_space(images)))
        return np.asarray(logits.softmax(-1).numpy(), dtype=np.float32)

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


def to_model_space(images: Media) -> npt.NDArray[np.float32]:
    """Converts bytes (n, 1, 8, 8) to -1..1."""
    if images.dtype != np.uint8 or images.shape[1:] != SHAPE:
        raise ValueError(
            f"a digit scorer needs uint8 images (n, 1, 8, 8); got {images.dtype} {images.shape}"
        )
    return (images.astype(np.float32) / 127.5) - 1
