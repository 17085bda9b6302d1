"""Named points at which a test kills this very process, as the kernel would: without a last word.

    DIGENRL_FAILPOINT=<point>:<nth>     SIGKILL when the process comes to the point for the nth
        time

The variable is read once, when this module is imported; without it a point costs one comparison.
``<nth>`` counts from 1, which it is if it is left out. The code with a point names it.
"""

import os
import signal

VARIABLE = "DIGENRL_FAILPOINT"


def parsed(text: str) -> tuple[str, int] | None:
    """Return the point and how often it is passed before; None without one.

    Raises:
        ValueError: if what follows the last colon is no number from 1 on.
    """
    point, colon, number = text.rpartition(":")
    if not colon:
        return (text, 1) if text else None
    if not number.isdecimal() or not int(number) or not point:
        raise ValueError(f"{VARIABLE}: {text!r} is not <point>:<nth>, with nth from 1 on")
    return point, int(number)


_wanted = parsed(os.environ.get(VARIABLE, ""))
_passed = 0


def reach(point: str) -> None:
    """Mark a point of the process; the process ends here, if this is the configured one."""
    global _passed
    if _wanted is None or _wanted[0] != point:
        return
    _passed += 1
    if _passed == _wanted[1]:
        os.kill(os.getpid(), signal.SIGKILL)
