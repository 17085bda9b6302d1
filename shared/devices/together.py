"""Decides how many groups' merged steps go through the network in one pass.

A step that all samples of a group begin at one state is one row of the network, and a pass of one
row may take as long to call as ten rows do to compute. So what groups have of it is held back until
as many wait as take no more than twice as long together as one takes alone: the last of them is
then trained no later than by one pass more, and the device is free for most of the time that the
passes of each alone would take. What a pass takes is measured, as the number is doubled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shared.recipe.recipe import Recipe

ENOUGH = 4
"""Passes of a size that are measured, of which the fastest counts: whatever else the machine does
makes them longer."""
AS_LONG = 2.0
"""Times that a pass of several groups may take as long as that of one."""
WORTH_IT = 0.75
"""Share of the seconds of each alone that it may take: where rows fill the device, nobody waits."""
HOLD_S = 2.0
"""Seconds that a group is held back at most, where others are long in coming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Holds what passes of some numbers of groups have taken."""

    most: int
    """Number of groups of an optimizer step, or that memory has room for."""
    seconds: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Return how many groups the next pass had better have."""
        number, best = 1, 1
        while number <= self.most:
            taken = self.seconds.get(number, ())
            if len(taken) < ENOUGH:
                return number
            alone, together = min(self.seconds[1]), min(taken)
            if number > 1 and together > min(AS_LONG, WORTH_IT * number) * alone:
                return best
            best, number = number, 2 * number
        return best

    def measures(self, number: int) -> bool:
        """Return whether a pass of so many groups tells anything new."""
        return number == self.number and len(self.seconds.get(number, ())) < ENOUGH

    def observe(self, number: int, seconds: float) -> "Together":
        """Return the next state. Once a size has been measured, nothing more changes."""
        if not self.measures(number):
            return self
        taken = self.seconds.get(number, ())
        return replace(self, seconds={**self.seconds, number: (*taken, seconds)})

    def without(self, number: int) -> "Together":
        """Return the next state if so many did not fit."""
        return replace(self, most=max(1, number // 2))


def make_together(recipe: Recipe) -> Together | None:
    """Return how many groups to train together, of which nothing is known yet; None where a group
    has other steps, or passes have to be the same each time or those of other devices."""
    table, sampling = recipe.trainer, recipe.sampling
    merged_only = sampling.merged_steps == sampling.window
    alone = table.devices == 1 and not recipe.schedule.has_members
    if table.deterministic or not (merged_only and alone):
        return None
    return Together(most=recipe.batch.groups // table.updates)
