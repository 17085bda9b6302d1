"""Asks a server until it answers, for the scorers that ask one.

Asks again, with longer and longer waits, when there is no answer or the server is not well; what
the server refuses is not asked again.
"""

import time
from collections.abc import Callable

import httpx

from shared.errors import ScorerUnavailable, ScoringError

FIRST_WAIT_S, MAX_WAIT_S = 0.1, 5.0
BUSY = 429
MAX_REASON = 500
"""Characters of an answer that are told."""


def ask(
    send: Callable[[], httpx.Response], *, at: str, patience: float, secret: str | None = None
) -> httpx.Response:
    """The first answer that is a success.

    ``patience``: seconds in which there must be one. ``secret`` is told to nobody, though the
    server repeat it.

    Raises:
        ScoringError: if the server refuses.
        ScorerUnavailable: if patience is at an end.
    """
    deadline, wait = time.monotonic() + patience, FIRST_WAIT_S
    while True:
        try:
            response = send()
            if response.is_success:
                return response
            reason = f"{response.status_code}: {without(secret, response.text)[:MAX_REASON]}"
            if not response.is_server_error and response.status_code != BUSY:
                raise ScoringError(f"{at} refuses: {reason}")
        except httpx.TransportError as error:
            reason = f"{type(error).__name__}: {without(secret, str(error))}"
        if time.monotonic() + wait > deadline:
            raise ScorerUnavailable(f"{at}: no score in {patience:.0f} s ({reason})")
        time.sleep(wait)
        wait = min(2 * wait, MAX_WAIT_S)


def without(secret: str | None, text: str) -> str:
    return text.replace(secret, "***") if secret else text
