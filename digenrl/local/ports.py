"""Ports of this machine that nobody listens on."""

import random
import socket

from shared.errors import UserError

FIRST, LAST = 20000, 32000
"""Below the range that Linux hands out to clients."""


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_ports(count: int, *, paired_at: int = 0) -> list[int]:
    """Different free ports; with ``paired_at``, each one's partner that far above is free too.

    Raises:
        UserError: if hardly any port of this machine is free.
    """
    chosen: list[int] = []
    for port in random.sample(range(FIRST, LAST), LAST - FIRST):
        if port_is_free(port) and (not paired_at or port_is_free(port + paired_at)):
            chosen.append(port)
        if len(chosen) == count:
            return chosen
    raise UserError(f"fewer than {count} ports of this machine are free between {FIRST} and {LAST}")
