"""Refuses requests before the routes of a service are called, and closes slow connections.

A page in the browser of a person who can reach a service must neither read it nor act on it:

    Host            A name that is not the service's own is refused (421). A page whose name was
                    made to point here (DNS rebinding) sends its own name. It cannot send a bare
                    address, so every address is taken.
    Origin          Requests that change something are refused if they come from another site's
                    page (403). A client that sends neither Sec-Fetch-Site nor Origin is no
                        browser.
    Content-Type    Content types that a page can send without a preflight request (forms, text)
        are refused (415). A
                    request without a body needs no type: for it the two above are enough.
    caller          A token or a session whose role may do it (401, 403): `http_access.py`. A
        browser without a session gets a page that explains how to get one.
    body            64 KiB, and 10 seconds, unless the service reads its bodies itself (413,
        408).

Requests that change something are logged, with who has asked and what was answered.

uvicorn closes a connection that is idle between two requests, but has no timeout for a request that
has begun. Here the head of a request must be complete within a time limit, and a body may not be
silent for longer than that.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import h11
import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from shared.limits import REQUEST_TIMEOUT_S
from shared.process.http_access import CALLER, ON_BEHALF, Access, AuditedChange, Caller
from shared.process.http_api import Refusal, refusal

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
SAME_SITE = frozenset({"same-origin", "none"})
"""Values of Sec-Fetch-Site that a page of ours sends, and that typed addresses send."""
HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?", re.ASCII)


log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits what may be sent to a service."""

    content_types: tuple[str, ...] = ("application/json",)
    max_bytes: int | None = 64 << 10
    """Largest body; None if the application reads its bodies itself, with a limit of its own."""
    seconds: float = 10.0


DEFAULT_BODIES = BodyLimits()


@dataclass(frozen=True, slots=True)
class Guard:
    """An ASGI application that guards another one."""

    app: ASGIApp
    names: frozenset[str]
    """Accepted host names of the service, in lower case; `*.name` is every name below."""
    bodies: BodyLimits = DEFAULT_BODIES
    access: Access = field(default_factory=Access)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = _hardened(send)
        if scope["method"] in SAFE_METHODS:
            await self._answer(scope, receive, send)
        else:
            await self._answer(scope, receive, _audited(scope, send, self.access))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            caller = self._admit(scope["method"], scope["path"], headers)
            body = await self._body(headers, receive)
            scope[CALLER] = caller
            if body is not None:
                receive = _replayed(body, receive)
            await self.app(scope, receive, send)
        except Refusal as refused:
            answer = refusal(refused, scope)
            answer.headers["connection"] = "close"  # its body may still be on the way
            await answer(scope, receive, send)

    def _admit(self, method: str, path: str, headers: Headers) -> Caller | None:
        """Return who asks, if it matters. Raises Refusal."""
        check_host(headers.getlist("host"), self.names)
        if method not in SAFE_METHODS:
            check_origin(headers)
            check_content_type(headers, self.bodies.content_types)
        return self.access.check(method, path, headers)

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """Return the request's body, if it has to be read here. Raises Refusal."""
        if self.bodies.max_bytes is None or not has_body(headers):
            return None
        check_length(headers, self.bodies.max_bytes)
        try:
            async with asyncio.timeout(self.bodies.seconds):
                return await _read(receive, self.bodies.max_bytes)
        except TimeoutError:
            late = f"{self.bodies.seconds:g} s"
            raise Refusal(408, f"the body was not here after {late}; send it again") from None


def _hardened(send: Send) -> Send:
    """Return a `Send` with headers against sniffing of content types and, unless set otherwise,
    against caching: responses depend on the caller."""

    async def harden(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["x-content-type-options"] = "nosniff"
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return harden


def _audited(scope: Scope, send: Send, access: Access) -> Send:
    """Return a `Send` that logs what is answered to a request that changes something, and has it
    kept before that if the caller is known."""

    async def audit(message: Message) -> None:
        if message["type"] == "http.response.start":
            caller = scope.get(CALLER)
            operation = f"{scope['method']} {scope['path']}"[:200]
            client, status = (scope.get("client") or ("",))[0], message["status"]
            on_behalf = Headers(scope=scope).get(ON_BEHALF, "")[:100]
            log.info(
                "audit",
                caller=None if caller is None else caller.name,
                role=None if caller is None else caller.role,
                **({"on_behalf": on_behalf} if on_behalf else {}),
                operation=operation, client=client, status=status,
            )  # fmt: skip
            if access.audit is not None and caller is not None:
                await access.audit(AuditedChange(caller, on_behalf, operation, client, status))
        await send(message)

    return audit


def own_names(bound_to: str, allowed: Iterable[str] = ()) -> frozenset[str]:
    """Return the names of a service that listens on ``bound_to``: this machine's, and the allowed
    ones."""
    machine = socket.gethostname()
    names = {"localhost", bound_to, machine, machine.split(".")[0], *allowed}
    return frozenset(name.lower() for name in names if name)


def check_host(given: Sequence[str], names: Collection[str]) -> None:
    """Raises Refusal unless the one Host header names this service, or is an address."""
    match = HOST.fullmatch(given[0].lower()) if len(given) == 1 else None
    name = "" if match is None else match["name"].strip("[]").removesuffix(".")
    above = (name[dot:] for dot, letter in enumerate(name) if letter == ".")
    if name in names or any(f"*{rest}" in names for rest in above) or _is_address(name):
        return
    raise Refusal(
        421,
        f"host: {', '.join(given)[:100]!r} is no name of this service; ask it by its address, "
        "or add the name to DIGENRL_ALLOWED_HOSTS",
    )


def check_origin(headers: Headers) -> None:
    """Raises Refusal if another site's page sends this."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        ours = site in SAME_SITE
    else:
        ours = origin is None or origin.partition("://")[2] == headers["host"]
    if not ours:
        raise Refusal(403, f"origin: a page of {origin or 'another site'} may not change anything")


def check_content_type(headers: Headers, allowed: Collection[str]) -> None:
    given = headers.get("content-type")
    if given is None and not has_body(headers):
        return
    if (given or "").partition(";")[0].strip().lower() not in allowed:
        raise Refusal(415, f"content-type: send {' or '.join(allowed)}, not {given or 'nothing'}")


def check_length(headers: Headers, max_bytes: int) -> None:
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()) or int(length) > max_bytes:
        raise _too_long(max_bytes)


def has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "the connection was closed before the body was here")
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_long(max_bytes)
        more = message.get("more_body", False)
    return bytes(body)


def _too_long(max_bytes: int) -> Refusal:
    return Refusal(413, f"the body has more than {max_bytes >> 10} KiB; send less")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `Receive` that gives the body that was read, then what comes after it."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class PatientH11(H11Protocol):
    """Closes the connection when its timeout expires."""

    timeout_s = REQUEST_TIMEOUT_S
    _deadline: asyncio.TimerHandle | None = None
    _waits_for: object = None
    """IDLE while a request, or the rest of its head, is awaited; SEND_BODY for more of its body."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel()

    def _wait(self) -> None:
        """Start the time limit: for a head at its first byte, for a body at its newest."""
        state = self.conn.their_state
        if state is h11.IDLE and self._waits_for is h11.IDLE:
            return
        self._cancel()
        if state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing():
            self._waits_for = state
            self._deadline = self.loop.call_later(self.timeout_s, self._give_up)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._waits_for = None

    def _give_up(self) -> None:
        self._cancel()
        if self.flow.read_paused:  # it is the service that does not read
            self._wait()
        elif self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self.transport.close()
