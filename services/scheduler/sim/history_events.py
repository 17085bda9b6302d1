"""What devices of the simulated cluster are used for."""

from typing import Literal, NamedTuple

Use = Literal["generate", "train", "commit", "load", "exchange"]


class Interval(NamedTuple):
    """A device in use."""

    device: str
    use: Use
    begin: float
    end: float
