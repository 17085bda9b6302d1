"""Blind comparison: pairs in random order with random sides, and the tally of votes."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from digenrl.reading.intervals import Interval, share_interval


class BlindPair(NamedTuple):
    number: int
    """Place of the pair among all pairs."""
    is_swapped: bool
    """Whether the second of the pair is on the left."""


class Tally(NamedTuple):
    """Votes for the first and the second of the pairs, and for neither."""

    first: int
    second: int
    ties: int

    @property
    def share(self) -> Interval | None:
        """Share of the second among the votes for either; None without any."""
        return share_interval(self.second, self.first + self.second)

    @property
    def leading_share(self) -> Interval | None:
        """Likewise the share of the one with more votes, whichever it is."""
        return share_interval(max(self.first, self.second), self.first + self.second)


def blind_order(num_pairs: int, seed: int) -> list[BlindPair]:
    """Return all pairs in an order, and with sides, that depend on the seed alone.

    >>> blind_order(3, 1) == blind_order(3, 1), sorted(each.number for each in blind_order(3, 1))
    (True, [0, 1, 2])
    """
    draws = random.Random(seed)
    return [
        BlindPair(each, draws.random() < 0.5) for each in draws.sample(range(num_pairs), num_pairs)
    ]


def count_votes(order: Sequence[BlindPair], votes: str) -> Tally:
    """Count the votes, one letter for each pair in order: l for the left one, r, or t for a tie.

    >>> count_votes([BlindPair(0, False), BlindPair(1, True), BlindPair(2, True)], "llt")
    Tally(first=1, second=1, ties=1)
    """
    pairs = list(zip(order, votes, strict=False))
    second = sum(vote != "t" and (vote == "l") == pair.is_swapped for pair, vote in pairs)
    ties = votes.count("t")
    return Tally(len(pairs) - second - ties, second, ties)
