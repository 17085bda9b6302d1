"""Asks a server until it answers, for the scorers that ask one.

Asks again, after longer and longer waits, if there is no answer or the server has an error; what
the server refuses is not asked again. The key that it asks for is in no recipe, log or error.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

import httpx

from services.reward import limits
from shared.errors import ScorerUnavailable, ScoringError, UserError
from shared.proxies import through
from shared.recipe.rewards import Judge, KeyTable


def read_key(settings: KeyTable) -> str | None:
    """Return the key, or None if the recipe names no location for one.

    Raises:
        UserError: if that place has no key, or something that cannot be one.
    """
    table = "judge" if isinstance(settings, Judge) else "remote"
    if settings.key_env is not None:
        field, value = f"{table}.key_env", os.environ.get(settings.key_env)
        if value is None:
            raise UserError(
                f"{field}: {settings.key_env} is not set here; set it, or leave key_env out"
            )
    elif settings.key_file is not None:
        field = f"{table}.key_file"
        try:
            value = settings.key_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text"
            raise UserError(f"{field}: cannot read {settings.key_file}: {reason}") from None
    else:
        return None
    key = value.strip()
    if not key or not all("!" <= character <= "~" for character in key):
        raise UserError(f"{field}: this is no key; a key is one word of ASCII characters")
    return key


HTTP_TOO_MANY_REQUESTS = 429
MAX_REASON = 500
"""Characters quoted of an answer."""


def ask(
    client: httpx.Client, url: str, *, patience: float, secret: str | None = None, **body: Any
) -> bytes:
    """Posts ``body`` (`content` or `json`) to ``url`` and returns the first answer that is a
    success.

    ``patience`` is how many seconds it may take in all. ``secret`` is kept out of errors, even if
    the server repeats it.

    Raises:
        ScoringError: if the server refuses, or answers more than a scorer's server can mean.
        ScorerUnavailable: if there is no answer in that time.
    """
    deadline, wait = time.monotonic() + patience, limits.FIRST_WAIT_S
    while True:
        try:
            status, answer = _answer(client, url, deadline, body)
            if httpx.codes.is_success(status):
                return answer
            text = answer.decode(errors="replace")
            reason = f"{status}: {without(secret, text)[:MAX_REASON]}"
            if not httpx.codes.is_server_error(status) and status != HTTP_TOO_MANY_REQUESTS:
                raise ScoringError(f"{url} refuses: {reason}")
        except httpx.TransportError as error:
            reason = f"{type(error).__name__}: {without(secret, str(error))}"
        if time.monotonic() + wait > deadline:
            message = f"{url}: no score in {patience:.0f} s{through(url)} ({reason})"
            raise ScorerUnavailable(message)
        time.sleep(wait)
        wait = min(2 * wait, limits.MAX_WAIT_S)


def _answer(
    client: httpx.Client, url: str, deadline: float, body: Mapping[str, Any]
) -> tuple[int, bytes]:
    """Returns status and bytes of one answer; a server that drips ends at the deadline as well."""
    left, usual = max(0.1, deadline - time.monotonic()), client.timeout
    timeout = httpx.Timeout(min(left, usual.read or left), connect=min(left, usual.connect or left))
    # A compressed answer of a few kilobytes may be gigabytes.
    headers, content = {"accept-encoding": "identity"}, bytearray()
    with client.stream("POST", url, headers=headers, timeout=timeout, **body) as response:
        for part in response.iter_raw():
            content += part
            if len(content) > limits.MAX_ANSWER_BYTES:
                raise ScoringError(f"{url} answers more than {limits.MAX_ANSWER_BYTES >> 20} MiB")
            if time.monotonic() > deadline:
                raise httpx.ReadTimeout("the answer was not complete in time")
        return response.status_code, bytes(content)


def without(secret: str | None, text: str) -> str:
    return text.replace(secret, "***") if secret else text
