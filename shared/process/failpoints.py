"""Named points at which a test kills its process with SIGKILL, without any clean-up.

    DIGENRL_FAILPOINT=<point>:<nth>     SIGKILL when the process reaches the point for the nth time

The variable is read once, when this module is imported; without it a point costs one comparison.
``<nth>`` counts from 1; the default is 1. `reach` names the points in the code.
"""

import os
import signal

VARIABLE = "DIGENRL_FAILPOINT"


def parse_failpoint(text: str) -> tuple[str, int] | None:
    """Return the point and the number of the visit that kills; None for an empty text.

    Raises:
        ValueError: if the text after the last colon is not a number of at least 1.
    """
    point, colon, number = text.rpartition(":")
    if not colon:
        return (text, 1) if text else None
    if not number.isdecimal() or not int(number) or not point:
        raise ValueError(f"{VARIABLE}: {text!r} is not <point>:<nth> with nth of at least 1")
    return point, int(number)


_configured = parse_failpoint(os.environ.get(VARIABLE, ""))
_num_visits = 0


def reach(point: str) -> None:
    """Mark a point of the code; kill the process at the configured visit of this point."""
    global _num_visits
    if _configured is None or _configured[0] != point:
        return
    _num_visits += 1
    if _num_visits == _configured[1]:
        os.kill(os.getpid(), signal.SIGKILL)
