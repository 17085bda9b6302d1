"""How long the scheduler itself is busy with a step, which no simulation includes."""

from services.scheduler.costs import fluid
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.split import Split
from shared.recipe.schedule import RunSchedule

RESULT_SECONDS, RESULT_SECONDS_EACH = 0.23e-3, 5.3e-8
"""CPU seconds of the scheduler for a result among many, with all that follows from it, and for each
device that there is: .25 ms were measured with 512 devices, .33 with 2,048, .44 with 4,096 (`python
-m bench growth --live`, on a core of a virtual machine)."""
PIECE_SECONDS, PIECE_SECONDS_EACH = 0.24e-3, 4.5e-7
"""The same for a piece that a member has trained, with its part of exchange and step: .5 ms,
.9 and 2.1."""


def scheduler_seconds(
    profile: Profile, split: Split, schedule: RunSchedule, factor: int = 1
) -> float:
    """Return about how long a core of the scheduler is busy with a batch in fragments of a fixed
    size: a step takes no less, however many devices there are.

    ``factor``: number of times that there are as many devices and groups.
    """
    shape, devices = profile.shape, factor * sum(split.devices.values())
    fragments = shape.samples / (schedule.fixed_fragment or shape.group_size)
    members = sum(split.trainer.values()) // profile.variant.ranks
    pieces = factor * min(shape.most_pieces, fluid.PIECES_EACH * members)
    results = factor * 2 * fragments  # generated, and scored
    result = RESULT_SECONDS + RESULT_SECONDS_EACH * devices
    return results * result + pieces * (PIECE_SECONDS + PIECE_SECONDS_EACH * devices)
