"""Trains the demo's reward (a CNN on half A) and its gold rewards (an MLP and an SVM on half B)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file
from torch import nn

from bench.digits.data import to_uint8
from digenrl.evaluation.digits import DataSplit
from services.reward.prompt_checks import NUM_DIGITS
from services.reward.scorers.digits import DigitProbability, DigitSvm, to_model_space

Arrays = dict[str, npt.NDArray[Any]]

NUM_EPOCHS = 60
BATCH_SIZE = 64
LEARNING_RATE = 2e-3
NOISE = 0.2
"""Standard deviation of the noise that is added to images, as generated ones are never clean."""
SVM_GAMMA = 0.04
SVM_C = 10.0


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


def build_rewards(
    folder: Path, half_a: DataSplit, half_b: DataSplit, *, seed: int, report: Callable[[str], None]
) -> None:
    """Write the reward folder, then measure each classifier on the half it has not seen."""
    folder.mkdir(parents=True, exist_ok=True)
    save_network(_train(proxy_network, half_a, seed), folder / "proxy.safetensors")
    save_network(_train(gold_network, half_b, seed + 1), folder / "gold_mlp.safetensors")
    save_file(fit_svm(half_b), folder / "gold_svm.safetensors")
    real: Arrays = {"images": half_b.images, "labels": half_b.labels}
    save_file(real, folder / "real.safetensors")

    report(f"proxy on half B: {accuracy(DigitProbability(folder), half_b):.3f}")
    report(f"gold MLP on half A: {accuracy(DigitProbability(folder, 'gold_mlp'), half_a):.3f}")
    report(f"gold SVM on half A: {accuracy(DigitSvm(folder), half_a):.3f}")


def accuracy(classifier: DigitProbability | DigitSvm, half: DataSplit) -> float:
    return float((classifier.predict(to_uint8(half.images)) == half.labels).mean())


def fit_svm(half: DataSplit) -> Arrays:
    """Returns the arrays that `DigitSvm` evaluates."""
    from sklearn.svm import SVC

    rows = to_model_space(to_uint8(half.images)).reshape(len(half.images), -1)
    machine = SVC(C=SVM_C, gamma=SVM_GAMMA).fit(rows, half.labels)
    fitted: Arrays = {
        name: np.ascontiguousarray(getattr(machine, f"{name}_"))
        for name in ("support_vectors", "dual_coef", "intercept", "n_support")
    }
    return fitted | {"gamma": np.array([SVM_GAMMA])}


def save_network(network: nn.Module, path: Path) -> None:
    save_file({name: tensor.numpy() for name, tensor in network.state_dict().items()}, path)


def _train(build: Callable[[], nn.Module], half: DataSplit, seed: int) -> nn.Module:
    images, labels = torch.from_numpy(half.images), torch.from_numpy(half.labels)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build()
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=1e-2)
    starts = range(0, len(images), BATCH_SIZE)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_EPOCHS * len(starts))
    for _ in range(NUM_EPOCHS):
        order = torch.randperm(len(images), generator=generator)
        for start in starts:
            rows = order[start : start + BATCH_SIZE]
            noise = torch.randn(images[rows].shape, generator=generator)
            noisy = images[rows] + NOISE * noise
            loss = nn.functional.cross_entropy(network(noisy), labels[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()
    return network.requires_grad_(False).eval()
