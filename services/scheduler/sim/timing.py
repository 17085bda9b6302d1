"""How long things take in the simulated cluster."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds, without noise."""

    fragment: Callable[[str, int], float]
    """(device kind, samples) -> generation, to the decoded media. Infinite: it cannot."""
    gradient: Callable[[str, int], float]
    """(device kind, samples) -> gradient of so many samples of a group, on one device."""
    help: Callable[[int], float]
    """(samples) -> generation on one device of a trainer whose devices go together."""
    score: Callable[[int], float]
    """(samples) -> reward."""
    train: Callable[[int], float]
    """(samples) -> gradient of a group, on all of the trainer's devices together."""
    commit: float
    """Optimizer step."""
    publish: float = 0.0
    """Time from the optimizer step to the commit record; with fluid devices, from the copy to
    weights that others can use."""
    states: float = 0.0
    """Time from there to the commit record, with fluid devices."""
    adopt: float
    """Loading a version before the first fragment by it, where it was not staged."""
    trained_steps: int = 1
    """Trained steps of a sample, which is the most parts that its gradient is computed in."""
    divides_steps: bool = True
    """Whether devices may share the trained steps of a sample."""
    merged_steps: int = 0
    """Trained steps that a group computes once for all its samples, as one piece of work."""
    merged_part: float = 0.0
    """Share of a whole group's gradient that this piece takes."""
    steps: int
    """Denoising steps of a fragment: where a borrowed device can be called back."""
    switch: float = 0.0
    """Switch of a trainer whose devices go together, to generation and back."""
    noise: float = 0.0
    """Coefficient of variation of every duration."""
    piece: Callable[[str, int, int], float] | None = None
    """(device kind, samples, trained steps of each) -> a piece's gradient on a fluid device. None:
    as many parts of what a group's takes as it has rows."""
    exchange: float = 0.0
    """Seconds from the last member's arrival to the total of all sums, on every member."""
    step: float = 0.0
    """The optimizer's step on a fluid device."""
    snapshot: float = 0.0
    """Copying what is to be committed: the committer's device waits for that."""
    adopt_state: float = 0.0
    """Loading a version's weights, moments and average."""
