"""Time-step parallelism (TSP): decides how many samples and denoising steps share one pass.

A chunk of S samples x K steps goes through the network as S K rows in one forward and backward
pass. Every row's loss is divided by the one denominator of the batch, so the chunk changes the
speed and the memory of training and not its result: groups of one batch may be cut differently. The
cost model behind it: a pass has a fixed cost (kernel launches, weights gathered from other ranks)
and a cost per row; memory is the resident part plus an equal share for every row.

`Tuner` is a pure state machine over measurements; the engine takes them.
"""

from dataclasses import dataclass, replace
from typing import Literal

from shared.recipe.recipe import Recipe

TRIALS = 2
"""Groups per candidate; the fastest counts, because the first pass of a shape warms up."""
MIN_SPEEDUP = 1.02
"""How much faster a larger chunk has to be: it takes memory that others on the device can use."""
MEMORY_SHARE = 0.92
"""Share of a device's memory that work may fill, measured or estimated: the rest is what allocator
and kernels take beyond. On an H200 all peaks but decoding were within 8 % of their estimates."""
MAX_SLOWER_CANDIDATES = 2
"""Number of candidates in a row that are not faster and so end the search."""


@dataclass(frozen=True, slots=True)
class Chunk:
    samples: int
    steps: int
    """The K of TSP."""

    @property
    def rows(self) -> int:
        return self.samples * self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measures the training, in such chunks, of one group or of a slice of the usual size."""

    chunk: Chunk
    seconds: float
    peak_bytes: int
    resident_bytes: int = 0
    """Part of the peak that was there before the pass, and does not grow with its rows."""
    network_rows: int = 1
    """Rows that the network computed with a gradient: fewer than samples x steps where some begin
    at one state, of which fragments of unlike devices have more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuner:
    """Climbs from small chunks to large ones, then stays with the fastest.

    A chunk is tried only if it is expected to fit: its memory is extrapolated in proportion to
    rows from the largest that was measured. The smallest is tried in any case.
    """

    candidates: tuple[Chunk, ...]
    """Sorted by their number of rows, ascending."""
    budget_bytes: float
    measured: tuple[Measurement, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether the choice is final, and nothing needs to be measured any more."""
        return len(self.candidates) == 1 or self._next() is None

    @property
    def chunk(self) -> Chunk:
        """The chunk to train the next group in."""
        return self._next() or self._best()

    def observe(self, measurement: Measurement) -> "Tuner":
        """Return the next state. A measurement that was not asked for changes nothing."""
        if self.settled or measurement.chunk != self.chunk:
            return self
        return replace(self, measured=(*self.measured, measurement))

    def without(self, chunk: Chunk) -> "Tuner":
        """Return the next state if a chunk did not fit: it and larger ones are tried no more. The
        state stays the same if none is smaller."""
        smaller = tuple(each for each in self.candidates if each.rows < chunk.rows)
        if not smaller:
            return self
        measured = tuple(each for each in self.measured if each.chunk in smaller)
        return replace(self, candidates=smaller, measured=measured)

    def _next(self) -> Chunk | None:
        """Return the candidate to measure, if the search continues."""
        if not self.measured:
            return self.candidates[0]
        position = len(self.measured) // TRIALS
        if position == len(self.candidates):
            return None
        chunk = self.candidates[position]
        promising = position - self.candidates.index(self._best()) <= MAX_SLOWER_CANDIDATES
        return chunk if promising and self._fits(chunk) else None

    def _fits(self, chunk: Chunk) -> bool:
        last = self.measured[-1]
        growth = max(0, last.peak_bytes - last.resident_bytes)
        return last.resident_bytes + growth * chunk.rows / last.chunk.rows <= self.budget_bytes

    def _best(self) -> Chunk:
        """Return the fastest measured within the budget; a larger one only if it is worth it."""
        too_large = {m.chunk for m in self.measured if m.peak_bytes > self.budget_bytes}
        seconds: dict[Chunk, float] = {}
        for m in self.measured:
            per_row = m.seconds / m.network_rows
            seconds[m.chunk] = min(per_row, seconds.get(m.chunk, per_row))
        best = self.candidates[0]
        for chunk in seconds:
            if chunk not in too_large and seconds[chunk] * MIN_SPEEDUP < seconds[best]:
                best = chunk
        return best


def make_tuner(recipe: Recipe, device_bytes: float, num_samples: int | None = None) -> Tuner:
    """Return the tuner of a recipe's chunks, on a device with so much memory that trains
    ``num_samples`` of a group at a time, by default all that are trained.

    Sizes that the recipe fixes are not tuned. In deterministic mode nothing is measured: sums of
    floats depend on how rows are cut, so "auto" is then a whole group with its whole window. Chunks
    contain steps that are not merged: the states of a merged step join a chunk, or have their own
    pass.
    """
    table, window = recipe.trainer, recipe.sampling.window
    later = max(1, window - recipe.sampling.merged_steps)
    whole = num_samples or recipe.trained_samples
    samples = _ladder(table.micro_batch, whole, only_last=table.deterministic)
    steps = _ladder(recipe.schedule.tsp_steps, later, only_last=table.deterministic)
    return Tuner(
        candidates=(
            *(Chunk(samples[0], k) for k in steps),
            *(Chunk(s, steps[-1]) for s in samples[1:]),
        ),
        budget_bytes=(
            MEMORY_SHARE * device_bytes if table.memory_gib is None else table.memory_gib * 2**30
        ),
    )


def _ladder(given: int | Literal["auto"], whole: int, *, only_last: bool) -> list[int]:
    """Return the given size, or ``whole`` in 1, 2, 4, ... parts as even as can be; ascending."""
    if given != "auto":
        return [given]
    if only_last:
        return [whole]
    halvings = range(whole.bit_length() + 1)
    return sorted({-(-whole // 2**n) for n in halvings})
