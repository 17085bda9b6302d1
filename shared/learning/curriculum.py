"""Prompts that teach nothing any more are drawn less often (`data.curriculum`).

A group is saturated if its rewards spread by less than a quarter of what all rewards of its batch
do: its samples are all good, or all bad, and their differences are noise. A prompt whose newest
group was saturated is passed over at a share of its draws, and comes back at the others, so that
what has changed is seen.

Which prompts a batch takes follows from the seed and from the rewards in the commit records of the
batches up to three before it, which every process knows that has to name them: a device that
generates the next batch early, an encoder two batches ahead, whoever resumes the run.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache

from shared.learning.advantages import population_std
from shared.learning.seeds import derive, permutation

BEHIND = 3
"""Batches from the newest one whose rewards count for a batch to that batch."""
KEPT = 2 * BEHIND
"""Newest batches whose prompts are known: those that were drawn ahead, and as many before them."""
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


@dataclass(frozen=True, slots=True)
class Draws:
    """Knows the prompts of the batches that may be asked for, however long a run is: of old ones
    only what later draws depend on is kept. Immutable; `seeing` a batch draws another one."""

    seed: int
    size: int
    """Number of prompts."""
    skipped: float
    """Share of its draws at which a prompt is passed over whose newest group was saturated."""
    num_groups: int
    """Prompts of a batch."""
    num_seen: int = 0
    """Batches whose rewards are known: all below this number."""
    _batches: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Prompts of the newest `KEPT` batches that are drawn, by the number of the batch."""
    _resting: frozenset[int] = frozenset()
    """Prompts whose newest group was saturated, as of what counts for the newest batch drawn."""
    _position: int = 0
    """Number of draws so far, those that were passed over among them."""

    def of_batch(self, batch: int) -> tuple[int, ...]:
        """Return the prompts of a batch's groups.

        Raises:
            ValueError: if a batch that counts for it was not seen, or if it is long past.
        """
        known = self if self._batches else self.seeing(())
        found = known._batches.get(batch)
        if found is not None:
            return found
        if batch < self.num_seen:
            raise ValueError(f"the prompts of batch {batch} were forgotten: it is long past")
        raise ValueError(f"batch {batch - BEHIND} counts for batch {batch}, and is not committed")

    def seeing(self, committed: Iterable[Saturated]) -> "Draws":
        """Return what is drawn once these are known: which groups were saturated of the batches
        from `num_seen` on."""
        batches, resting, position = dict(self._batches), set(self._resting), self._position
        num_seen = self.num_seen
        if not batches:  # the first ones are drawn after no other
            for batch in range(BEHIND):
                batches[batch], position = self._drawn(resting, position)
        for groups in committed:
            for prompt, is_saturated in zip(batches[num_seen], groups, strict=True):
                (resting.add if is_saturated else resting.discard)(prompt)
            batches[num_seen + BEHIND], position = self._drawn(resting, position)
            num_seen += 1
            batches.pop(num_seen + BEHIND - 1 - KEPT, None)
        return replace(
            self,
            num_seen=num_seen,
            _batches=batches,
            _resting=frozenset(resting),
            _position=position,
        )

    def _drawn(self, resting: Set[int], position: int) -> tuple[tuple[int, ...], int]:
        """Draw the next batch: its prompts, and the position behind them."""
        prompts: list[int] = []
        for _ in range(self.num_groups):
            prompt, position = self._next(resting, position)
            prompts.append(prompt)
        return tuple(prompts), position

    def _next(self, resting: Set[int], position: int) -> tuple[int, int]:
        for _ in range(self.size):
            epoch, index = divmod(position, self.size)
            position += 1
            prompt = epoch_order(self.seed, self.size, epoch)[index]
            if prompt not in resting or not self._is_skipped(epoch, prompt):
                break
        return prompt, position  # the last one if all were passed over in a row

    def _is_skipped(self, epoch: int, prompt: int) -> bool:
        return derive(self.seed, "curriculum", epoch, prompt) % UNIT < self.skipped * UNIT
