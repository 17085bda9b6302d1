"""Asks a server until it answers, for the scorers that ask one.

Asks again, after longer and longer waits, if there is no answer or the server has an error; what
the server refuses is not asked again.
"""

import time
from collections.abc import Callable

import httpx

from shared.errors import ScorerUnavailable, ScoringError

FIRST_WAIT_S, MAX_WAIT_S = 0.1, 5.0
BUSY = 429
MAX_REASON = 500
"""Characters quoted of an answer."""


def ask(
    send: Callable[[], httpx.Response], *, at: str, patience: float, secret: str | None = None
) -> httpx.Response:
    """Returns the first answer that is a success.

    ``patience`` is how many seconds it may take. ``secret`` is kept out of errors, even if the
    server repeats it.

    Raises:
        ScoringError: if the server refuses.
        ScorerUnavailable: if there is no answer in that time.
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
