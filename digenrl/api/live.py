"""Requests to the scheduler of a run in progress; a finished run has none."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from fastapi import HTTPException, Response
from pydantic import TypeAdapter

from shared.caches import keep_newest
from shared.errors import UserError
from shared.process.settings import ClientSettings

TIMEOUT_S = 5.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")
CACHE_S = 0.5
"""Age in seconds from which an answer is requested again."""
MAX_STALE_S = 1.0
"""Age up to which the old answer is still given meanwhile: a scheduler that opens a batch is slow
to answer."""
MAX_KEPT_ANSWERS = 256
"""Answers that are kept."""
FORWARDED_HEADERS = ("content-type", "retry-after")
T = TypeVar("T")


@dataclass(slots=True)
class LiveRun:
    """Asks the scheduler on behalf of page and API, with one cache for both.

    Each path is requested at most twice a second, however many readers there are. An answer is at
    most a second old, and never older than a change that went through here.
    """

    url: str
    """Address of the scheduler's API; empty for a run that is looked at after its end."""
    client: httpx.AsyncClient
    _kept: dict[str, tuple[float, Response]] = field(default_factory=dict)
    changes: int = 0
    """Requests that changed something."""
    _asking: dict[str, "asyncio.Task[Response]"] = field(default_factory=dict)
    """Requests that have no answer yet."""

    async def get(self, path: str) -> Any | None:
        """Return an answer's JSON; None without a scheduler, or if it reports an error."""
        try:
            answer = await self.read(path)
            return json.loads(bytes(answer.body)) if answer.status_code < 400 else None
        except (HTTPException, ValueError):
            return None

    async def get_as(self, kind: type[T], path: str) -> T | None:
        """Return an answer of a type; None without a scheduler, or if it reports an error."""
        data = await self.get(path)
        return None if data is None else TypeAdapter(kind).validate_python(data)

    async def read(self, path: str) -> Response:
        """Return the answer to a GET.

        Raises:
            HTTPException: if the scheduler does not answer.
        """
        at, kept = self._kept.get(path, (float("-inf"), None))
        age = time.monotonic() - at
        if age > CACHE_S and path not in self._asking:
            task = self._asking[path] = asyncio.create_task(self._ask_once(path))
            task.add_done_callback(_retrieve_error)
        if kept is None or age > MAX_STALE_S:
            kept = await asyncio.shield(self._asking[path])
        return Response(kept.body, kept.status_code, dict(kept.headers))

    async def change(self, path: str, **more: Any) -> Response:
        """Pass a POST on; every later answer is from after it.

        Raises:
            HTTPException: if the scheduler does not answer.
        """
        try:
            return await self._ask("POST", path, **more)
        finally:
            self.changes += 1
            self._kept.clear()
            self._asking.clear()

    async def _ask_once(self, path: str) -> Response:
        """Ask, and keep the answer unless a change came meanwhile."""
        task = asyncio.current_task()
        try:
            answer = await self._ask("GET", path)
            if self._asking.get(path) is task:
                keep_newest(self._kept, path, (time.monotonic(), answer), MAX_KEPT_ANSWERS)
            return answer
        finally:
            if self._asking.get(path) is task:
                del self._asking[path]

    async def _ask(self, method: str, path: str, **more: Any) -> Response:
        if not self.url:
            raise HTTPException(409, "the run is over; `digenrl up RECIPE --resume` resumes it")
        try:
            answer = await self.client.request(method, f"{self.url}{path}", **more)
        except httpx.HTTPError as error:
            raise HTTPException(503, f"the scheduler does not answer: {error}") from error
        kept = {name: answer.headers[name] for name in FORWARDED_HEADERS if name in answer.headers}
        return Response(answer.content, answer.status_code, kept)


def _retrieve_error(task: "asyncio.Task[Response]") -> None:
    """Retrieve the error of an abandoned request, or asyncio logs it."""
    if not task.cancelled():
        task.exception()


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
    return httpx.AsyncClient(headers=headers, timeout=TIMEOUT_S, verify=verify, trust_env=False)
