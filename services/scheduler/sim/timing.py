"""How long things take in the simulated cluster."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds, without noise."""

    fragment: Callable[[str, int], float]
    """(device kind, samples) -> generation, to the decoded media."""
    help: Callable[[int], float]
    """(samples) -> generation on one of the trainer's devices."""
    score: Callable[[int], float]
    """(samples) -> reward."""
    train: Callable[[int], float]
    """(samples) -> gradient of a group, on all of the trainer's devices together."""
    commit: float
    """Optimizer step and publication."""
    adopt: float
    """Loading a version before the first fragment by it, where it was not staged."""
    steps: int
    """Denoising steps of a fragment: where a borrowed device can be called back."""
    switch: float = 0.0
    """Of a trainer's device to generation and back."""
    noise: float = 0.0
    """Coefficient of variation of every duration."""
