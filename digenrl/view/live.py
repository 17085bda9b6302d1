"""Asks the scheduler of a run that goes on; of a finished run there is none."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from shared.errors import UserError
from shared.process.settings import ClientSettings

TIMEOUT_S = 5.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")
FRESH_S = 0.5
"""Seconds for which an answer is given again: many pages may ask for the same."""


@dataclass(slots=True)
class LiveRun:
    """Knows what the scheduler answers just now."""

    url: str
    """Address of the scheduler's API; empty for a run that is looked at after its end."""
    client: httpx.AsyncClient
    _answers: dict[str, tuple[float, Any]] = field(default_factory=dict)

    async def get(self, path: str) -> Any | None:
        """Return an answer; None if there is no scheduler or it says nothing."""
        if not self.url:
            return None
        at, answer = self._answers.get(path, (float("-inf"), None))
        if time.monotonic() - at > FRESH_S:
            try:
                found = await self.client.get(f"{self.url}{path}")
                answer = found.raise_for_status().json()
            except (httpx.HTTPError, ValueError):
                answer = None
            self._answers[path] = time.monotonic(), answer
        return answer

    async def post(self, path: str) -> httpx.Response:
        """Send a request; raises httpx.HTTPError if the scheduler does not answer."""
        try:
            return await self.client.post(f"{self.url}{path}")
        finally:
            self._answers.clear()


def client_of(scheduler: str, token_file: Path | None) -> httpx.AsyncClient:
    """Return a client of the scheduler's API; on loopback there is no certificate to check,
    elsewhere it may be one of DIGENRL_CA.

    Args:
        token_file: file with a token; None: the settings have one, or none is needed.

    Raises:
        UserError: if the file cannot be read.
    """
    headers = ClientSettings().headers
    if token_file is not None:
        try:
            headers = {"authorization": f"Bearer {token_file.read_text().strip()}"}
        except OSError as error:
            raise UserError(f"--token-file: {token_file}: {error.strerror}") from error
    is_here = urlsplit(scheduler).hostname in LOOPBACK
    verify = False if is_here else ClientSettings().trusted
    return httpx.AsyncClient(headers=headers, timeout=TIMEOUT_S, verify=verify)
