"""Uses of devices of the simulated cluster."""

from typing import Literal, NamedTuple

SimUse = Literal["generate", "train", "commit", "load", "exchange"]


class Interval(NamedTuple):
    """A device in use."""

    device: str
    use: SimUse
    begin: float
    end: float
