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
from typing import Protocol
from unittest.mock import patch
from urllib.parse import ParseResult

from nats.aio.transport import TcpTransport

NO_PROCESS = contextvars.Context()
"""Bytes on their way and servers belong to no process: killing one does not stop them."""


class Endpoint(Protocol):
    """Is a server that takes connections."""

    is_up: bool

    def accept(self, connection: "Connection") -> None: ...
    def receive(self, connection: "Connection", data: bytes) -> None: ...
    def disconnected(self, connection: "Connection") -> None: ...


class Direction:
    """One direction of a connection."""

    def __init__(self, deliver: Callable[[bytes | None], None]) -> None:
        self.delay: Callable[[], float] | None = None
        """Returns the seconds that the next write takes; None: no time at all."""
        self.is_cut = self.is_ended = False
        self._deliver = deliver
        self._in_flight: deque[tuple[float, bytes | None]] = deque()
        self._last_arrival = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def write(self, data: bytes | None) -> None:
        """Send bytes; None: nothing comes any more."""
        if self.is_ended:
            return
        self.is_ended = data is None
        wait = 0.0 if self.delay is None else self.delay()
        if not wait and not self._in_flight and not self.is_cut:
            self._deliver(data)
            return
        self._last_arrival = max(self._last_arrival, asyncio.get_running_loop().time() + wait)
        self._in_flight.append((self._last_arrival, data))
        self._schedule()

    def cut(self) -> None:
        """Hold all bytes until `mend`."""
        self.is_cut = True

    def mend(self) -> None:
        self.is_cut = False
        self._schedule()

    def drop(self) -> None:
        """Lose what is on its way, and take no more."""
        self.is_ended = True
        self._in_flight.clear()

    def _schedule(self) -> None:
        if self._timer is None and self._in_flight and not self.is_cut:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._in_flight[0][0], self._deliver_due, context=NO_PROCESS)

    def _deliver_due(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time() + 1e-6
        while self._in_flight and self._in_flight[0][0] <= now and not self.is_cut:
            self._deliver(self._in_flight.popleft()[1])
        self._schedule()


class Connection:
    """A connection of a client to a server, which the client writes to; faults take hold of it."""

    def __init__(self, server: Endpoint, number: int) -> None:
        self.number, self.server, self.is_open = number, server, True
        self.name = self.user = ""
        """As the client has given them, once it has."""
        self.context = contextvars.copy_context()
        """That in which the client connected: whose process it is."""
        self.reader = asyncio.StreamReader()
        self.to_server, self.to_client = Direction(self._at_server), Direction(self._at_client)

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
        self.reader.set_exception(ConnectionResetError("connection reset by peer"))

    def close(self) -> None:
        """Close the client's side, as the system does for a process that was killed."""
        self.to_server.write(None)
        self.to_client.drop()
        self.reader.feed_eof()

    def write(self, data: bytes) -> None:
        self.to_server.write(data)

    def writelines(self, data: list[bytes]) -> None:
        self.to_server.write(b"".join(data))

    async def drain(self) -> None:
        if error := self.reader.exception():
            raise error

    async def wait_closed(self) -> None:
        pass

    def _at_server(self, data: bytes | None) -> None:
        if self.is_open and data is not None:
            self.server.receive(self, data)
        elif self.is_open:
            self.is_open = False
            self.server.disconnected(self)

    def _at_client(self, data: bytes | None) -> None:
        if data is None:
            self.reader.feed_eof()
        else:
            self.reader.feed_data(data)


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

    def open(self, host: str | None, port: int | None) -> Connection:
        server = self.servers.get((host or "", port or 0))
        if server is None or not server.is_up:
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
        self._made += 1
        connection = Connection(server, self._made)
        self._connections.append(connection)
        for hook in self.on_connect:
            hook(connection)
        server.accept(connection)
        return connection


class MemoryTransport(TcpTransport):  # type: ignore[misc] # nats-py is not followed
    """Is the client's own transport, over a connection in memory."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network = network

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        self._io_writer = self._network.open(uri.hostname, uri.port)
        self._io_reader = self._io_writer.reader


@contextlib.contextmanager
def installed(network: Network) -> Iterator[None]:
    """Have every NATS client that connects within the block use this network."""
    with patch("nats.aio.client.TcpTransport", functools.partial(MemoryTransport, network)):
        yield
