"""Prompts that teach nothing any more are drawn less often (`data.curriculum`).

A group is saturated if its rewards spread by less than a quarter of what all rewards of its batch
do: its samples are all good, or all bad, and their differences are noise. A prompt whose newest
group was saturated is passed over at a share of its draws, and comes back at the others, so that
what has changed is seen.

Which prompts a batch takes follows from the seed and from the rewards in the commit records of the
batches up to three before it, which every process knows that has to name them: a device that
generates the next batch early, an encoder two batches ahead, whoever resumes the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from shared.learning.advantages import population_std
from shared.learning.seeds import derive, permutation

BEHIND = 3
"""Batches from the newest one whose rewards count for a batch to that batch."""
SATURATED = 0.25
"""Share of the batch's standard deviation below which that of a group is."""
UNIT = 1 << 53

Saturated = tuple[bool, ...]
"""Says of each group of a batch whether it was saturated."""


def saturated(groups: Sequence[Sequence[float | None]]) -> Saturated:
    """Return which groups of a batch are saturated, from their rewards; none that has not two.

    >>> saturated([[1.0, 1.0], [0.0, 1.0], [None, 1.0]])
    (True, False, False)
    """
    known = [[reward for reward in group if reward is not None] for group in groups]
    everything = [reward for group in known for reward in group]
    limit = SATURATED * population_std(everything) if everything else 0.0
    return tuple(len(group) > 1 and population_std(group) <= limit for group in known)


@lru_cache(maxsize=8)
def epoch_order(seed: int, size: int, epoch: int) -> list[int]:
    """Return the order in which an epoch takes all prompts."""
    return permutation(seed, size, "epoch", epoch)


@dataclass(slots=True)
class Draws:
    """Draws the prompts of one batch after the other, and remembers them: what was drawn follows
    from the seed and from the batches that it was drawn after, and never changes."""

    seed: int
    size: int
    """Number of prompts."""
    skipped: float
    """Share of its draws at which a prompt is passed over whose newest group was saturated."""
    _batches: list[tuple[int, ...]] = field(default_factory=list)
    _resting: set[int] = field(default_factory=set)
    """Prompts whose newest group was saturated, as of what counts for the newest batch."""
    _position: int = 0
    """Number of draws so far, those that were passed over among them."""

    def of_batch(self, batch: int, num_groups: int, seen: Sequence[Saturated]) -> tuple[int, ...]:
        """Return the prompts of a batch's groups.

        ``seen``: which groups were saturated of each batch that is committed, the first one first.

        Raises:
            ValueError: if a batch that counts is not among them.
        """
        while len(self._batches) <= batch:
            newest = len(self._batches) - BEHIND
            if newest >= len(seen):
                raise ValueError(f"batch {newest} counts for batch {batch}, and is not committed")
            if newest >= 0:
                self._learn(self._batches[newest], seen[newest])
            self._batches.append(tuple(self._next() for _ in range(num_groups)))
        return self._batches[batch]

    def _learn(self, prompts: Sequence[int], groups: Saturated) -> None:
        for prompt, is_saturated in zip(prompts, groups, strict=True):
            (self._resting.add if is_saturated else self._resting.discard)(prompt)

    def _next(self) -> int:
        for _ in range(self.size):
            epoch, index = divmod(self._position, self.size)
            self._position += 1
            prompt = epoch_order(self.seed, self.size, epoch)[index]
            if prompt not in self._resting or not self._is_skipped(epoch, prompt):
                return prompt
        return prompt  # all were passed over in a row

    def _is_skipped(self, epoch: int, prompt: int) -> bool:
        return derive(self.seed, "curriculum", epoch, prompt) % UNIT < self.skipped * UNIT
