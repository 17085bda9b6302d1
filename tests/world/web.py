"""HTTP in memory: the httpx clients of the product reach its ASGI applications without a socket.

Each request has a connection of its own, as after `Connection: close`. What arrived before its
other end died can still be read; then reading fails as it does with TCP. There is no TLS, no
parsing of HTTP, and no limit of uvicorn's (heads, idle connections).
"""

import asyncio
import contextvars
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import patch

import httpx
from fastapi import FastAPI
from starlette.types import ASGIApp, Message

from shared.cancellation import stop
from shared.errors import UserError
from shared.limits import REQUEST_GRACE_S
from shared.process.http_access import Access, check_routes
from shared.process.http_guard import DEFAULT_BODIES, BodyLimits, Guard, own_names
from shared.process.service import Listener, Tls
from tests.world.blocking import sleeping_on_the_loop, wait_for
from tests.world.loop import current

MAX_UNREAD = 64
"""Parts of an answer that a connection holds until its client reads."""
RETRY_S = 0.25
"""Seconds after which what a cut has stopped is sent again."""
SERVICES = (
    "services.scheduler.shell.service", "shared.process.worker_process",
    "digenrl.local.running.page", "digenrl.evaluation.process",
)  # fmt: skip
"""Modules that start a service."""
Link = Callable[[str, str], float | None]
"""Seconds from one process to another; None if nothing passes."""


@dataclass(slots=True, eq=False)
class Connection:
    """Carries one request and its answer."""

    web: "Web"
    site: "Site"
    client: str
    scope: dict[str, Any]
    body: bytes | None
    """Body of the request; None once the application has it."""
    unread: deque[Message] = field(default_factory=deque)
    fault: str = ""
    """Why it broke; empty if it did not."""
    has_begun: bool = False
    is_over: bool = False
    task: "asyncio.Task[None] | None" = None
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> Message:
        if self.body is not None:
            body, self.body = self.body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._until(lambda: self.is_over)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.web.cross(self.site.process, self.client)
        await self._until(lambda: self.is_over or len(self.unread) < MAX_UNREAD)
        if not self.is_over:
            self.unread.append(message)
            self.has_begun = True
            if not message.get("more_body", message["type"] == "http.response.start"):
                self.is_over = True
            self._moved.set()

    async def read(self, seconds: float | None) -> Message:
        """Return the next part of the answer; raises as httpx does."""
        try:
            async with asyncio.timeout(seconds):
                await self._until(lambda: self.is_over or bool(self.unread))
        except TimeoutError:
            raise httpx.ReadTimeout("") from None
        if not self.unread:
            raise httpx.ReadError(self.fault)
        message = self.unread.popleft()
        self._moved.set()
        return message

    def end(self, fault: str = "") -> None:
        """Close it: the application is told that its client has gone, the client of a fault."""
        if not self.is_over:
            self.is_over, self.fault = True, fault
            self._moved.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._moved.clear()
            await self._moved.wait()


@dataclass(slots=True, eq=False)
class Site:
    """Is a port that a process holds, and the application that answers on it."""

    process: str
    app: ASGIApp | None = None
    """None until the process serves: connections wait."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    connections: list[Connection] = field(default_factory=list)

    def serve(self, app: ASGIApp) -> None:
        self.app, self.context = app, contextvars.copy_context()
        for connection in self.connections:
            self.answer(connection)

    def answer(self, connection: Connection) -> None:
        """Have the server's process answer; nothing of the client's context is there."""
        loop, context = asyncio.get_running_loop(), self.context.copy()
        connection.task = loop.create_task(self._answer(connection), context=context)

    async def _answer(self, connection: Connection) -> None:
        assert self.app is not None
        try:
            await self.app(connection.scope, connection.receive, connection.send)
        except Exception as error:
            path = connection.scope["path"]
            connection.web.errors.append(f"{self.process} fails at {path}: {error!r}")
            if not connection.has_begun:
                await connection.send({"type": "http.response.start", "status": 500, "headers": []})
                await connection.send({"type": "http.response.body"})
        connection.end("the server has closed the connection")
        self.connections.remove(connection)

    async def finish(self) -> None:
        """Wait for answers that are under way, for as long as uvicorn does."""
        tasks = [each.task for each in self.connections if each.task is not None]
        _, late = await asyncio.wait(tasks, timeout=REQUEST_GRACE_S) if tasks else ((), ())
        for connection in list(self.connections):
            connection.end("the server has ended")
        await stop(*(task for task in tasks if task in late))


@dataclass(slots=True)
class Web:
    """Is the network: who listens where, and what passes between processes."""

    process: Callable[[], str] = lambda: ""
    """Returns the name of the process that runs now."""
    link: Link = lambda sender, receiver: 0.0
    sites: dict[tuple[str, int], Site] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    """What applications have raised: each a defect."""
    _ports: Iterator[int] = field(default_factory=lambda: itertools.count(20_000))

    def listen(
        self, host: str, port: int, *, tls: Tls | None = None, plain: bool = False
    ) -> Listener:
        """Has the signature of `shared.process.service.listen`."""
        port = port or next(self._ports)
        if (host, port) in self.sites:
            raise UserError(f"--port: {port} is occupied on {host}; choose another")
        self.sites[host, port] = Site(self.process())
        return Listener(cast(Any, port), host, f"http://{host}:{port}")

    async def serve(
        self, app: ASGIApp, work: Coroutine[None, None, None], *, listener: Listener,
        access: Access | None = None, allowed_hosts: Collection[str] = (),
        bodies: BodyLimits = DEFAULT_BODIES,
    ) -> None:  # fmt: skip
        """Has the signature of `shared.process.service.serve`, and ends as that does."""
        address = listener.host, cast(int, listener.socket)
        access = access or Access()
        if isinstance(app, FastAPI) and not access.is_open:
            check_routes(app)
        site = self.sites[address]
        site.serve(Guard(app, own_names(listener.host, allowed_hosts), bodies, access))
        task, told = asyncio.create_task(work), asyncio.get_running_loop().create_future()
        if (process := current()) is not None:
            process.told_to_end = told
        try:
            await asyncio.wait({task, told}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self.sites.get(address) is site:
                del self.sites[address]
            await site.finish()
            [error] = await stop(task)
        if error is not None:
            raise error

    def kill(self, process: str) -> None:
        """Close what the kernel closes of a process that has died: its ports, and both ends of its
        connections."""
        self._break(f"{process} has died", lambda *ends: process in ends)
        gone = [address for address, site in self.sites.items() if site.process == process]
        for address in gone:
            del self.sites[address]

    def reset(self, client: str, server: str) -> None:
        """Break the connections between two processes, neither of which dies."""
        self._break("connection reset by peer", lambda *ends: ends == (client, server))

    def _break(self, fault: str, breaks: Callable[[str, str], bool]) -> None:
        for site in self.sites.values():
            for connection in site.connections:
                if breaks(connection.client, site.process):
                    connection.end(fault)

    async def cross(self, sender: str, receiver: str) -> None:
        """Return when something sent has arrived."""
        while (seconds := self.link(sender, receiver)) is None:  # noqa: ASYNC110 -- as TCP does
            await asyncio.sleep(RETRY_S)
        if seconds:
            await asyncio.sleep(seconds)

    async def connect(self, request: httpx.Request, seconds: float | None) -> Connection:
        url, client = request.url, self.process()
        address = url.host, url.port or {"http": 80, "https": 443}[url.scheme]
        body = await request.aread()
        try:
            async with asyncio.timeout(seconds):
                if address in self.sites:
                    await self.cross(client, self.sites[address].process)
        except TimeoutError:
            raise httpx.ConnectTimeout("", request=request) from None
        site = self.sites.get(address)
        if site is None:
            raise httpx.ConnectError("All connection attempts failed", request=request)
        connection = Connection(self, site, client, _scope(request, address), body)
        site.connections.append(connection)
        if site.app is not None:
            site.answer(connection)
        return connection

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have every httpx client and every service use this network, and routes that block answer
        on the loop."""

        async def run_sync(function: Callable[[], Any], *arguments: Any, **_: Any) -> Any:
            return function(*arguments)

        transport = Transport(self)
        patches: dict[str, Any] = {
            "httpx._client.AsyncHTTPTransport": lambda **_: transport,
            "httpx._client.HTTPTransport": lambda **_: transport,
            "shared.process.settings.listen": self.listen,
            "anyio.to_thread.run_sync": run_sync,
            **{f"{module}.serve": self.serve for module in SERVICES},
        }
        with ExitStack() as stack:
            stack.enter_context(sleeping_on_the_loop())
            for name, replacement in patches.items():
                stack.enter_context(patch(name, replacement))
            yield


def _scope(request: httpx.Request, address: tuple[str, int]) -> dict[str, Any]:
    url = request.url
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": request.method, "scheme": url.scheme, "path": url.path, "root_path": "",
        "raw_path": url.raw_path.split(b"?")[0], "query_string": url.query, "server": address,
        "client": ("127.0.0.1", 0), "state": {},
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
    }  # fmt: skip


@dataclass(slots=True)
class Answer(httpx.AsyncByteStream, httpx.SyncByteStream):
    """Streams the body of an answer."""

    connection: Connection
    seconds: float | None
    """Longest silence."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self.connection.read(self.seconds)
            more = message.get("more_body", False)
            yield message.get("body", b"")

    def __iter__(self) -> Iterator[bytes]:
        parts = aiter(self)
        while (part := wait_for(anext(parts, None))) is not None:
            yield part

    async def aclose(self) -> None:
        self.connection.end()

    def close(self) -> None:
        self.connection.end()


@dataclass(slots=True)
class Transport(httpx.AsyncBaseTransport, httpx.BaseTransport):
    """Sends requests of clients, also of blocking ones that `run_blocking` runs."""

    web: Web

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        patience = request.extensions.get("timeout", {})
        connection = await self.web.connect(request, patience.get("connect"))
        try:
            head = await connection.read(patience.get("read"))
        except BaseException:
            connection.end()
            raise
        body = Answer(connection, patience.get("read"))
        return httpx.Response(head["status"], headers=head["headers"], stream=body)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return wait_for(self.handle_async_request(request))
