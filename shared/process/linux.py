"""Calls by which Linux lets a process decide what happens when it, a parent or a child ends."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans(wanted: bool) -> bool:
    """Start or stop being the parent of descendants whose own parents end; return whether Linux
    allows it."""
    return bool(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(wanted)) == 0)


def has_pidfds() -> bool:
    """Return whether this system has pidfds; a sandbox may forbid them."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True
