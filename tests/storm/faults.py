"""Plans the faults of a storm, as a function of a seed."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "terminate", "freeze", "hang", "wipe", "flip", "fill"]
"""
kill, terminate   SIGKILL, SIGTERM
freeze, hang      SIGSTOP for some seconds, or for much longer than any lease
wipe              a broker has lost its data when it comes back
flip              a bit of an object of the newest batch changes
fill              the disk of NATS, or of the store, is full for a while

Other faults need no real process: `tests/world` has them.
"""
KINDS: Mapping[Kind, int] = {"kill": 12, "terminate": 3, "freeze": 5}
"""Kinds of a short storm, and the weight of each."""
ALL_KINDS: Mapping[Kind, int] = {
    "kill": 110, "terminate": 5, "freeze": 4, "hang": 2, "wipe": 4, "flip": 4, "fill": 1,
}  # fmt: skip
"""Kinds of a long one: more than two of three kill."""
GAP_S = 1.0
"""Mean seconds between two faults, which are drawn from half of it to one and a half."""
LASTS_S: Mapping[Kind, tuple[float, float]] = {
    "freeze": (0.5, 6.5), "hang": (15.0, 25.0), "fill": (3.0, 8.0),
}  # fmt: skip
"""Seconds that such a fault lasts; a worker's lease is five."""
AT_BROKERS: Mapping[Kind, tuple[str, ...]] = {
    "fill": ("nats", "objects"),
    "wipe": ("nats", "valkey"),
}
"""Kinds that strike one of these, whoever's turn it is: the store may not lose what it has."""


@dataclass(frozen=True, slots=True)
class Fault:
    target: str
    kind: Kind
    after: float
    """Seconds since the one before."""
    seconds: float = 0.0
    """How long it lasts."""

    def __str__(self) -> str:
        long = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind} {self.target}{long}"


def faults(
    seed: int,
    number: int,
    targets: Sequence[str],
    kinds: Mapping[Kind, int] = KINDS,
    gap: float = GAP_S,
) -> list[Fault]:
    """Return faults that strike every target about equally often, in any order.

    Args:
        gap: mean seconds between two of them.
    """
    draw, deck, found = random.Random(seed), list[str](), list[Fault]()
    for _ in range(number):
        deck = deck or draw.sample(list(targets), len(targets))
        [kind] = draw.choices(list(kinds), weights=list(kinds.values()))
        target = deck.pop()
        if kind in AT_BROKERS:
            target = draw.choice(AT_BROKERS[kind])
        seconds = draw.uniform(*LASTS_S[kind]) if kind in LASTS_S else 0.0
        found.append(Fault(target, kind, draw.uniform(0.5 * gap, 1.5 * gap), seconds))
    return found
