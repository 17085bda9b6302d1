"""How long things take in the simulated cluster."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds, without noise."""

    fragment: Callable[[str, int], float]
    """(device kind, samples) -> generation on a device that only generates, to the decoded media.
    Infinite: it cannot."""
    help: Callable[[str, int], float]
    """The same on a member, lent or not. Infinite: it cannot."""
    gradient: Callable[[str, int], float]
    """(device kind, samples) -> gradient of these samples of a group, on one device."""
    score: Callable[[int], float]
    """(samples) -> reward."""
    publish: float = 0.0
    """Time from the copy of what is to be committed to weights that others can use."""
    states: float = 0.0
    """Time from there to the commit record."""
    adopt: float
    """Loading a version before the first fragment by it, where it was not staged."""
    steps: int
    """Denoising steps of a fragment: between two of them a lent device can be called back."""
    noise: float = 0.0
    """Coefficient of variation of every duration."""
    piece: Callable[[str, int], float] | None = None
    """(device kind, rows of the device, or of the rank that has most) -> a piece's gradient. None:
    as many parts of what a group's takes as it has rows."""
    pass_rows: Callable[[str], int] | None = None
    """(device kind) -> rows of a training pass at most. None: unknown."""
    ranks: int = 1
    """Devices of a member, which divide the samples of its pieces."""
    gather: float = 0.0
    """Seconds in which they gather the whole network, before fragments that follow one another."""
    exchange: float = 0.0
    """Seconds from the last member's arrival to the total of all sums, on every member."""
    step: float = 0.0
    """The optimizer's step on a member."""
    snapshot: float = 0.0
    """Copying what is to be committed: the committer's device waits for that."""
    adopt_state: float = 0.0
    """Loading a version's weights, moments and average."""
    weights_bytes: int = 1
    """Size of a version's weights."""
    sample_bytes: int = 1
    """Size of a stored sample: states and media."""
    sum_bytes: int = 0
    """Size of a sum of gradients."""
