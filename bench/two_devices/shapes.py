"""The model and the batches of the bench: large enough that messages cost little beside them.

One thread takes 0.2 to 1.2 s to generate or to train a group of the digits' own size, and both
take about as long: where they do not, one of the devices alone decides what a batch takes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from digenrl.digits.network import Network

NETWORK = Network(layers=4, heads=4, head_width=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    steps: int
    """Denoising steps."""
    window: int
    """Of them, stochastic and trained."""


ALIKE = Shape(steps=16, window=4)
"""Generating a group takes a third longer than training it."""
LONG_TRAINING = Shape(steps=16, window=12)
"""Training takes twice as long."""
SHAPES = {"equal": ALIKE, "slowed": ALIKE, "trainer-bound": LONG_TRAINING}
GROUPS = 10
QUICK_GROUPS = 6


def model_folder(folder: Path, network: Network) -> Path:
    """Where a model of this size is kept."""
    width = network.heads * network.head_width
    return folder / f"model-d{width}-l{network.layers}-p{network.patch}"


def ensure_model(folder: Path, network: Network, *, seed: int) -> Path:
    """The folder of an untrained model of this size, made on first use in some seconds."""
    made = model_folder(folder, network)
    if not made.exists():
        from digenrl.digits.build import build_untrained  # torch

        aside = made.with_name(f"{made.name}.part")
        build_untrained(aside, network, seed=seed)
        aside.rename(made)
    return made


def shape_changes(shape: Shape, groups: int, model: Path) -> dict[str, Any]:
    """What the bench sets anew in the recipe that it is given, in every mode."""
    return {
        "model.folder": model,
        "model.height": 8,
        "model.width": 8,
        "sampling.steps": shape.steps,
        "sampling.window": shape.window,
        "batch.groups": groups,
        "trainer.threads": 1,
        "trainer.devices": 1,
        "trainer.deterministic": False,
        "rollout.workers": 1,
        "rollout.threads": 1,
        "reward.workers": 1,
        "reward.threads": 1,
    }
