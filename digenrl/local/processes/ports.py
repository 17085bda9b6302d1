"""Finds free ports of this machine for child processes.

A port that is only found to be free may be taken before the child listens, by another run or by
another child. So this process holds the ports that it hands out until it ends or releases them.
"""

import contextlib
import os
import random
import socket
import sys
from collections.abc import Iterator

from shared.errors import UserError

FIRST_PORT, LAST_PORT = 20000, 32000
"""A range below the ports that Linux gives to clients."""

NO_SOCKET = -1

_held: dict[int, int] = {}
"""Port -> file descriptor of the socket that holds the port."""


def hold_port(port: int) -> bool:
    """Hold a port for a child, so that ``free_ports`` does not hand it out again.

    The socket is bound and never listens. On Linux a child can still listen on the port, since both
    set SO_REUSEADDR, while others do not find the port free. On other systems only this process
    knows that it holds the port.

    Returns:
        False if the port is occupied.
    """
    if port in _held:
        return True
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", port))
        except OSError:
            return False
        _held[port] = holder.detach() if sys.platform == "linux" else NO_SOCKET
    return True


@contextlib.contextmanager
def releasing_ports() -> Iterator[None]:
    """Release, at the end, the ports that were held inside the block, whose children have ended."""
    before = set(_held)
    try:
        yield
    finally:
        for port in set(_held) - before:
            holder = _held.pop(port)
            if holder != NO_SOCKET:
                os.close(holder)


def free_ports(count: int, *, paired_at: int = 0) -> list[int]:
    """Hold and return different ports that are free.

    With ``paired_at``, the port that far above each of them is free as well, and held too.

    Raises:
        UserError: if this machine has too few free ports.
    """
    chosen: list[int] = []
    for port in random.sample(
        range(FIRST_PORT, LAST_PORT - paired_at), LAST_PORT - paired_at - FIRST_PORT
    ):
        wanted = {port, port + paired_at}
        if all(map(_is_free, wanted)) and all(map(hold_port, wanted)):
            chosen.append(port)
        if len(chosen) == count:
            return chosen
    raise UserError(
        f"fewer than {count} ports between {FIRST_PORT} and {LAST_PORT} are free on this machine"
    )


def _is_free(port: int) -> bool:
    """Return whether a port is neither used nor held: without SO_REUSEADDR, binding it fails."""
    if port in _held:
        return False
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
