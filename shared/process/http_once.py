"""Requests that name themselves with an Idempotency-Key: sent twice, they are done once.

    the same key and request   the first one's answer, again
    another request            422
    the first is under way     409: ask again

A key is worth something to its caller alone, for a day, and until the service is started again.
"""

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.process.http_api import Refused

HEADER = "idempotency-key"
KEY = re.compile(r"[\x21-\x7e]{1,200}")
KEPT_S = 24 * 3600.0
MAX_KEPT = 1000


@dataclass(slots=True)
class _Kept:
    fingerprint: bytes
    since: float
    answer: list[Message] | None = None
    """What was answered; None while it is not."""


@dataclass(slots=True)
class Once:
    clock: Callable[[], float] = lambda: time.monotonic()
    _kept: dict[tuple[str, str], _Kept] = field(default_factory=dict)

    def begin(self, caller: str, key: str, request: bytes) -> list[Message] | None:
        """Return the answer that ``request`` had under this key; None if it has to be done.

        Raises:
            Refused: if it is no key, the key is another request's, or that is under way.
        """
        if not KEY.fullmatch(key):
            raise Refused(422, f"{HEADER}: send 1 to 200 letters, digits or signs, without spaces")
        fingerprint, now = hashlib.sha256(request).digest(), self.clock()
        for old in [name for name, each in self._kept.items() if now - each.since > KEPT_S]:
            del self._kept[old]
        kept = self._kept.get((caller, key))
        if kept is None:
            while len(self._kept) >= MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[caller, key] = _Kept(fingerprint, now)
            return None
        if kept.fingerprint != fingerprint:
            raise Refused(422, f"{HEADER}: another request has this key; choose a new one")
        if kept.answer is None:
            raise Refused(409, f"{HEADER}: this request is under way; ask again")
        return kept.answer

    async def do(
        self, caller: str, key: str, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Have ``app`` answer, and keep its answer unless that is an error of the service."""
        said: list[Message] = []

        async def record(message: Message) -> None:
            said.append(message)
            await send(message)

        try:
            await app(scope, receive, record)
        finally:
            kept = self._kept.get((caller, key))
            if kept is not None and said and said[0]["status"] < 500:
                kept.answer = said
            else:
                self._kept.pop((caller, key), None)
