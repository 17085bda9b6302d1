"""Faults of a fluid device itself: it steps to other bits, or runs out of memory within a piece."""

from functools import partial
from random import Random

from tests.world.faults import Nemesis, Strike
from tests.world.loop import Flaw
from tests.world.world import World

SHARE = 0.3
"""Share of the worlds of fluid devices that have them."""
FIRST = 2000
"""Number of the first of them in a schedule."""
SLOWER = 2.0
"""They strike so much more seldom than other faults."""


def _flaw(flaw: Flaw, nemesis: Nemesis, _: Random, name: str) -> None:
    process = nemesis.world.services[name].process
    if process is not None and name.startswith("trainer"):
        process.flaw = flaw


FLAWS: dict[str, tuple[Strike, str]] = {
    "other bits": (partial(_flaw, "other bits"), "service"),
    "no memory": (partial(_flaw, "no memory"), "service"),
}


def flawed_nemesis(world: World, kept: frozenset[int] | None) -> list[Nemesis]:
    """Return what strikes with flaws, if this seed has them."""
    drawn = world.drawn
    if not drawn.setting.is_fluid or world.random_of("flaws").random() >= SHARE:
        return []
    return [Nemesis(world, kept, FLAWS, "flawed devices", FIRST, SLOWER * drawn.between_faults)]
