"""What devices of the simulated cluster are used for."""

from typing import Literal, NamedTuple

SumName = tuple[int, int, int, int]
"""Batch, attempt at it, update, and the number of the sum at its member."""
Use = Literal["generate", "train", "commit", "load", "exchange"]


class Interval(NamedTuple):
    """A device in use."""

    device: str
    use: Use
    begin: float
    end: float
