"""Ports of this machine for child processes to listen on.

A port that is only looked at may be taken before the child listens: by another run, or by another
child of the same one. So this process holds what it gives out, until it ends or lets go.
"""

import contextlib
import os
import random
import socket
import sys
from collections.abc import Iterator

from shared.errors import UserError

FIRST, LAST = 20000, 32000
"""Below the range that Linux hands out to clients."""

NO_SOCKET = -1

_held: dict[int, int] = {}
"""Port -> file descriptor of the socket that holds it."""


def hold_port(port: int) -> bool:
    """Whether a child may listen there; if so, ``free_ports`` gives it to nobody else.

    The socket is bound and never listens: on Linux a child may listen there all the same (both ask
    to reuse the address), while nobody who looks for a free port finds it. Elsewhere only this
    process knows.
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
def ports_let_go() -> Iterator[None]:
    """Let go, at the end, of the ports that were held since: the children there have ended."""
    before = set(_held)
    try:
        yield
    finally:
        for port in set(_held) - before:
            holder = _held.pop(port)
            if holder != NO_SOCKET:
                os.close(holder)


def free_ports(count: int, *, paired_at: int = 0) -> list[int]:
    """Different ports that nobody has or holds.

    With ``paired_at``, each one's partner that far above is free too, and held with it.

    Raises:
        UserError: if hardly any port of this machine is free.
    """
    chosen: list[int] = []
    for port in random.sample(range(FIRST, LAST - paired_at), LAST - paired_at - FIRST):
        wanted = {port, port + paired_at}
        if all(map(_is_free, wanted)) and all(map(hold_port, wanted)):
            chosen.append(port)
        if len(chosen) == count:
            return chosen
    raise UserError(f"fewer than {count} ports of this machine are free between {FIRST} and {LAST}")


def _is_free(port: int) -> bool:
    """Not even held: without asking to reuse the address, two cannot be bound to it."""
    if port in _held:
        return False
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
