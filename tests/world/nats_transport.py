"""Carries the bytes of the real NATS client to servers in memory; nothing opens a socket.

`installed(network)` gives nats-py a transport to the servers that a network has, by host and port.
Each direction of a connection can be delayed, cut and mended, and a connection can be dropped. What
is written arrives in its order, as over TCP. Not modelled: TLS, websockets, flow control, and a
connection that takes time to be made.
"""

import asyncio
import contextlib
import contextvars
import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from unittest.mock import patch
from urllib.parse import ParseResult

from nats.aio.transport import Transport

NO_PROCESS = contextvars.Context()
"""Bytes on their way and servers belong to no process: killing one does not stop them."""


class Endpoint(Protocol):
    """Is a server that takes connections."""

    is_up: bool

    def accept(self, connection: "Connection") -> None: ...
    def receive(self, connection: "Connection", data: bytes) -> None: ...
    def lost(self, connection: "Connection") -> None: ...


class Direction:
    """One direction of a connection."""

    def __init__(self, arrive: Callable[[bytes | None], None]) -> None:
        self.delay: Callable[[], float] | None = None
        """Returns the seconds that the next write takes; None: no time at all."""
        self.is_cut = self.is_ended = False
        self._arrive = arrive
        self._moving: deque[tuple[float, bytes | None]] = deque()
        self._newest = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def write(self, data: bytes | None) -> None:
        """Send bytes; None: nothing comes any more."""
        if self.is_ended:
            return
        self.is_ended = data is None
        wait = 0.0 if self.delay is None else self.delay()
        if not wait and not self._moving and not self.is_cut:
            self._arrive(data)
            return
        self._newest = max(self._newest, asyncio.get_running_loop().time() + wait)
        self._moving.append((self._newest, data))
        self._arm()

    def cut(self) -> None:
        """Hold all bytes until `mend`."""
        self.is_cut = True

    def mend(self) -> None:
        self.is_cut = False
        self._arm()

    def drop(self) -> None:
        """Lose what is on its way, and take no more."""
        self.is_ended = True
        self._moving.clear()

    def _arm(self) -> None:
        if self._timer is None and self._moving and not self.is_cut:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._moving[0][0], self._move, context=NO_PROCESS)

    def _move(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time() + 1e-6
        while self._moving and self._moving[0][0] <= now and not self.is_cut:
            self._arrive(self._moving.popleft()[1])
        self._arm()


class Connection:
    """A connection of a client to a server; faults take hold of it here."""

    def __init__(self, server: Endpoint, transport: "MemoryTransport", number: int) -> None:
        self.number, self.server, self.is_open = number, server, True
        self.name = self.user = ""
        """As the client has given them, once it has."""
        self.context = contextvars.copy_context()
        """That in which the client connected: whose process it is."""
        self.to_server = Direction(self._at_server)
        self.to_client = Direction(transport.arrive)
        self._transport = transport

    def cut(self) -> None:
        self.to_server.cut()
        self.to_client.cut()

    def mend(self) -> None:
        self.to_server.mend()
        self.to_client.mend()

    def drop(self) -> None:
        """Reset it: bytes on their way are lost, and both sides notice at once."""
        self.to_server.drop()
        self.to_client.drop()
        self._at_server(None)
        if self._transport.connection is self:
            self._transport.fail(ConnectionResetError("connection reset by peer"))

    def leave(self) -> None:
        """Close the client's side, as the system does for a process that was killed."""
        self.to_server.write(None)
        self.to_client.drop()

    def _at_server(self, data: bytes | None) -> None:
        if self.is_open and data is not None:
            self.server.receive(self, data)
        elif self.is_open:
            self.is_open = False
            self.server.lost(self)


class Network:
    """Knows the servers by host and port, and the connections that are open."""

    def __init__(self) -> None:
        self.servers: dict[tuple[str, int], Endpoint] = {}
        self.on_connect: list[Callable[[Connection], None]] = []
        """Called with each new connection before any byte is on it."""
        self._connections: list[Connection] = []
        self._made = 0

    @property
    def connections(self) -> list[Connection]:
        """The open ones, in the order in which they were made."""
        self._connections = [each for each in self._connections if each.is_open]
        return self._connections

    def open(self, host: str, port: int, transport: "MemoryTransport") -> Connection:
        server = self.servers.get((host, port))
        if server is None or not server.is_up:
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
        self._made += 1
        connection = transport.connection = Connection(server, transport, self._made)
        self._connections.append(connection)
        for hook in self.on_connect:
            hook(connection)
        server.accept(connection)
        return connection


class MemoryTransport(Transport):  # type: ignore[misc] # nats-py is not followed
    """What nats-py writes to and reads from, again each time that it connects."""

    def __init__(self, network: Network) -> None:
        self.connection: Connection | None = None
        self._network, self._buffer = network, bytearray()
        self._error: ConnectionError | None = None
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        self._buffer, self._error, self._is_over = bytearray(), None, False
        self._network.open(uri.hostname or "", uri.port or 0, self)

    async def connect_tls(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("in memory nothing is encrypted")

    def write(self, payload: bytes) -> None:
        if self.connection is not None and self._error is None:
            self.connection.to_server.write(payload)

    def writelines(self, payload: list[bytes]) -> None:
        self.write(b"".join(payload))

    async def drain(self) -> None:
        if self._error is not None:
            raise self._error

    async def read(self, buffer_size: int) -> bytes:
        while not self._buffer and await self._more():
            pass
        return self._taken(len(self._buffer))

    async def readline(self) -> bytes:
        while b"\n" not in self._buffer and await self._more():
            pass
        return self._taken(self._buffer.find(b"\n") + 1 or len(self._buffer))

    def _taken(self, size: int) -> bytes:
        found = bytes(self._buffer[:size])
        del self._buffer[:size]
        return found

    async def _more(self) -> bool:
        """Wait until something comes; return whether it may be bytes."""
        if self._error is not None:
            raise self._error
        if not self._is_over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return not self._is_over

    def close(self) -> None:
        if self.connection is not None:
            self.connection.leave()
            self.connection = None
        self.arrive(None)

    async def wait_closed(self) -> None:
        pass

    def at_eof(self) -> bool:
        return self._is_over and not self._buffer and self._error is None

    def __bool__(self) -> bool:
        return self.connection is not None or self._is_over

    def arrive(self, data: bytes | None) -> None:
        if data is None:
            self._is_over = True
        else:
            self._buffer += data
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: ConnectionError) -> None:
        self._error = error
        self.arrive(None)


@contextlib.contextmanager
def installed(network: Network) -> Iterator[None]:
    """Have every NATS client that connects within the block use this network."""
    with patch("nats.aio.client.TcpTransport", functools.partial(MemoryTransport, network)):
        yield
